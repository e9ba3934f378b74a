/*!
 * \file pool.h
 * \brief Memory of one size that is used again, also where it is taken on one thread and given back
 * on another, for which malloc is slow.
 */
#ifndef MLX_TVM_FFI_ARRAY_POOL_H_
#define MLX_TVM_FFI_ARRAY_POOL_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

// A few bytes of the room that every thread has anyway: an access is one instruction and not a
// call.
#if defined(__linux__)
#define MLX_TVM_FFI_STATIC_TLS __attribute__((tls_model("initial-exec")))
#else
#define MLX_TVM_FFI_STATIC_TLS
#endif

namespace mlx_tvm_ffi {

/*!
 * \brief Where nodes, which have a member `next`, come from and go back to: a free list per thread,
 * refilled from one list of the process. Made once, never destroyed, so that an address can be
 * recognised as one of them without a lock. Any thread.
 */
template <typename Node>
class Pool {
 public:
  static Pool& Get() {
    static Pool* pool = new Pool;  // leaked: nodes may come back at exit
    return *pool;
  }

  Node* Take() {
    ThreadList& list = local_;
    if (list.head == nullptr) Refill(&list);
    Node* node = list.head;
    list.head = node->next;
    --list.size;
    return node;
  }

  void Give(Node* node) {
    ThreadList& list = local_;
    node->next = list.head;
    list.head = node;
    if (++list.size == 1) CloseAtThreadsEnd();
    if (list.size > 2 * kBatch || list.closed) Return(&list, list.closed ? 0 : kBatch);
  }

  /*! \brief The node that `place` lies in; null where that is none of ours. */
  Node* Find(const void* place) const {
    auto address = reinterpret_cast<std::uintptr_t>(place);
    for (size_t i = 0, n = slab_count_.load(std::memory_order_acquire); i < n; ++i) {
      auto begin = reinterpret_cast<std::uintptr_t>(slabs_[i].begin);
      if (address >= begin && address < begin + slabs_[i].count * sizeof(Node)) {
        return slabs_[i].begin + (address - begin) / sizeof(Node);
      }
    }
    return nullptr;
  }

 private:
  static constexpr size_t kBatch = 64;

  // Without a destructor, so that each access is a plain one; Closer gives the rest back at the
  // thread's end.
  struct ThreadList {
    Node* head;
    size_t size;
    bool closed;
  };
  struct Closer {
    ~Closer() {
      local_.closed = true;
      Get().Return(&local_, 0);
    }
  };

  struct Slab {
    Node* begin;
    size_t count;
  };

  // Not inlined, as Refill and Return: what each call needs stays short.
  [[gnu::noinline]] static void CloseAtThreadsEnd() {
    static thread_local Closer closer;
    (void)closer;
  }

  [[gnu::noinline]] void Refill(ThreadList* list) {
    CloseAtThreadsEnd();
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_ == nullptr) AddSlab();
    for (size_t i = 0; i < kBatch && free_ != nullptr; ++i) {
      Node* node = std::exchange(free_, free_->next);
      node->next = std::exchange(list->head, node);
      ++list->size;
    }
  }

  [[gnu::noinline]] void Return(ThreadList* list, size_t keep) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (list->size > keep) {
      Node* node = std::exchange(list->head, list->head->next);
      node->next = std::exchange(free_, node);
      --list->size;
    }
  }

  // Each slab is twice the last, so that few are enough for any number of nodes.
  void AddSlab() {
    size_t index = slab_count_.load(std::memory_order_relaxed);
    size_t count = kBatch << index;
    Node* begin = new Node[count];
    for (size_t i = 0; i < count; ++i) begin[i].next = std::exchange(free_, begin + i);
    slabs_[index] = {begin, count};
    slab_count_.store(index + 1, std::memory_order_release);
  }

  static inline constinit thread_local ThreadList local_ MLX_TVM_FFI_STATIC_TLS{nullptr, 0, false};

  std::mutex mutex_;
  Node* free_ = nullptr;
  std::array<Slab, 40> slabs_;
  std::atomic<size_t> slab_count_{0};
};

/*! \brief Memory from a pool, for std::allocate_shared. */
template <typename T>
class PoolAllocator {
 public:
  using value_type = T;

  PoolAllocator() = default;
  template <typename U>
  PoolAllocator(const PoolAllocator<U>&) {}  // NOLINT: an allocator converts

  T* allocate(size_t) { return reinterpret_cast<T*>(Pool<Node>::Get().Take()->memory); }
  void deallocate(T* memory, size_t) {
    auto* node = reinterpret_cast<std::byte*>(memory) - offsetof(Node, memory);
    Pool<Node>::Get().Give(reinterpret_cast<Node*>(node));
  }

 private:
  struct Node {
    Node* next;
    alignas(T) std::byte memory[sizeof(T)];
  };
};

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_ARRAY_POOL_H_
