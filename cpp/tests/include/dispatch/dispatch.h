// A stand-in for libdispatch: a queue is a thread, and works off one thing after another.
#ifndef MLX_TVM_FFI_TESTS_DISPATCH_H_
#define MLX_TVM_FFI_TESTS_DISPATCH_H_

#include <condition_variable>
#include <mutex>
#include <thread>

struct dispatch_queue_s {
  dispatch_queue_s() : thread([this] { Work(); }) {}
  ~dispatch_queue_s() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      closed = true;
    }
    changed.notify_all();
    thread.join();
  }
  void Run(void* with, void (*to_run)(void*)) {
    std::lock_guard<std::mutex> turn(turns);
    std::unique_lock<std::mutex> lock(mutex);
    context = with;
    function = to_run;
    changed.notify_all();
    changed.wait(lock, [this] { return function == nullptr; });
  }
  void Work() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return function != nullptr || closed; });
      if (closed) return;
      function(context);
      function = nullptr;
      changed.notify_all();
    }
  }

  std::mutex turns;
  std::mutex mutex;
  std::condition_variable changed;
  void* context = nullptr;
  void (*function)(void*) = nullptr;
  bool closed = false;
  std::thread thread;
};
using dispatch_queue_t = dispatch_queue_s*;

inline void dispatch_sync_f(dispatch_queue_t queue, void* context, void (*function)(void*)) {
  queue->Run(context, function);
}

#endif  // MLX_TVM_FFI_TESTS_DISPATCH_H_
