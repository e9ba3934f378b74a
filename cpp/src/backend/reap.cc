#include "backend/reap.h"

#include <condition_variable>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>

namespace mlx_tvm_ffi {
namespace {

struct Reaper {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<void>> waiting;
  bool running = false;
  bool idle = true;
  bool stopped = false;

  void Run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return !waiting.empty() && !stopped; });
      idle = false;
      auto objects = std::exchange(waiting, {});
      lock.unlock();
      objects.clear();  // with no lock held: a destructor may wait for Python's
      lock.lock();
      idle = true;
      changed.notify_all();
    }
  }
};

// Leaked on purpose: its thread and late completion handlers outlive static destructors.
Reaper& ReaperOfProcess() {
  static auto* reaper = new Reaper;
  return *reaper;
}

}  // namespace

void Reap(std::vector<std::shared_ptr<void>> objects) noexcept {
  if (objects.empty()) return;
  Reaper& reaper = ReaperOfProcess();
  {
    std::lock_guard<std::mutex> lock(reaper.mutex);
    reaper.waiting.insert(reaper.waiting.end(), std::make_move_iterator(objects.begin()),
                          std::make_move_iterator(objects.end()));
    if (!reaper.running && !reaper.stopped) {
      reaper.running = true;
      std::thread(&Reaper::Run, &reaper).detach();
    }
  }
  reaper.changed.notify_all();
}

void StopReaping() noexcept {
  Reaper& reaper = ReaperOfProcess();
  std::unique_lock<std::mutex> lock(reaper.mutex);
  reaper.changed.wait(lock, [&] { return reaper.idle && reaper.waiting.empty(); });
  reaper.stopped = true;
}

}  // namespace mlx_tvm_ffi
