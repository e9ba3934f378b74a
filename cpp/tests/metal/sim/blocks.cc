// The blocks runtime that clang's -fblocks calls.
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int32_t kReferenceMask = 0xfffe;
constexpr int32_t kNeedsFree = 1 << 24;
constexpr int32_t kHasCopyDispose = 1 << 25;
constexpr int32_t kIsGlobal = 1 << 28;
constexpr int kFieldIsBlock = 7;
constexpr int kFieldIsByref = 8;

struct Descriptor {
  unsigned long reserved, size;
  void (*copy)(void*, const void*);
  void (*dispose)(const void*);
};

struct Block {
  void* isa;
  int32_t flags;
  int32_t reserved;
  void (*invoke)(void*, ...);
  Descriptor* descriptor;
};

// A __block variable.
struct Byref {
  void* isa;
  Byref* forwarding;
  int32_t flags;
  uint32_t size;
  void (*copy)(void*, void*);
  void (*dispose)(void*);
};

bool DropReference(int32_t* flags) {
  return (__atomic_sub_fetch(flags, 2, __ATOMIC_SEQ_CST) & kReferenceMask) == 0;
}

// Moves the variable from the stack to the heap, the first time.
Byref* CopyByref(Byref* source) {
  Byref* shared = source->forwarding;
  if (shared->flags & kNeedsFree) {
    __atomic_fetch_add(&shared->flags, 2, __ATOMIC_SEQ_CST);
    return shared;
  }
  auto* copy = static_cast<Byref*>(malloc(source->size));
  memcpy(copy, source, source->size);
  copy->flags |= kNeedsFree | 4;  // one for the block, one for the stack
  copy->forwarding = source->forwarding = copy;
  if (copy->flags & kHasCopyDispose) copy->copy(copy, source);
  return copy;
}

void ReleaseByref(Byref* source) {
  Byref* shared = source->forwarding;
  if (!(shared->flags & kNeedsFree) || !DropReference(&shared->flags)) return;
  if (shared->flags & kHasCopyDispose) shared->dispose(shared);
  free(shared);
}

}  // namespace

extern "C" {

void* _NSConcreteStackBlock[32];
void* _NSConcreteGlobalBlock[32];
void* _NSConcreteMallocBlock[32];

void* _Block_copy(const void* source) {
  auto* block = static_cast<Block*>(const_cast<void*>(source));
  if (!block || block->flags & kIsGlobal) return block;
  if (block->flags & kNeedsFree) {
    __atomic_fetch_add(&block->flags, 2, __ATOMIC_SEQ_CST);
    return block;
  }
  auto* copy = static_cast<Block*>(malloc(block->descriptor->size));
  memcpy(copy, block, block->descriptor->size);
  copy->isa = _NSConcreteMallocBlock;
  copy->flags = (copy->flags & ~0xffff) | kNeedsFree | 2;
  if (copy->flags & kHasCopyDispose) block->descriptor->copy(copy, block);
  return copy;
}

void _Block_release(const void* source) {
  auto* block = static_cast<Block*>(const_cast<void*>(source));
  if (!block || block->flags & kIsGlobal || !(block->flags & kNeedsFree)) return;
  if (!DropReference(&block->flags)) return;
  if (block->flags & kHasCopyDispose) block->descriptor->dispose(block);
  free(block);
}

void _Block_object_assign(void* target, const void* source, int flags) {
  void* value = const_cast<void*>(source);
  if ((flags & kFieldIsBlock) == kFieldIsBlock) {
    value = _Block_copy(source);
  } else if (flags & kFieldIsByref) {
    value = CopyByref(static_cast<Byref*>(value));
  }
  *static_cast<void**>(target) = value;
}

void _Block_object_dispose(const void* object, int flags) {
  if ((flags & kFieldIsBlock) == kFieldIsBlock) {
    _Block_release(object);
  } else if (flags & kFieldIsByref) {
    ReleaseByref(static_cast<Byref*>(const_cast<void*>(object)));
  }
}

}  // extern "C"
