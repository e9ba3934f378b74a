/*! \file Counters and the log, for the simulator's own files. */
#ifndef MLX_TVM_FFI_TESTS_METAL_SIM_REPORT_H_
#define MLX_TVM_FFI_TESTS_METAL_SIM_REPORT_H_

#include "sim.h"

namespace metal_sim {

struct Counters {
  std::atomic<long> compute_encoders{0}, blit_encoders{0}, empty_encoders{0}, command_buffers{0},
      commits{0}, waits{0}, event_host_waits{0}, barriers{0}, dispatches{0}, handlers{0},
      fence_waits{0}, fence_updates{0}, event_waits{0}, event_signals{0}, races{0};

  template <class F>
  void ForEach(F f) {
    f("compute_encoders", compute_encoders);
    f("blit_encoders", blit_encoders);
    f("empty_encoders", empty_encoders);
    f("command_buffers", command_buffers);
    f("commits", commits);
    f("waits", waits);
    f("event_host_waits", event_host_waits);
    f("barriers", barriers);
    f("dispatches", dispatches);
    f("handlers", handlers);
    f("fence_waits", fence_waits);
    f("fence_updates", fence_updates);
    f("event_waits", event_waits);
    f("event_signals", event_signals);
    f("races", races);
  }
};

Counters& GetCounters();
void ResetMessages();
[[gnu::format(printf, 1, 2)]] void Log(const char* format, ...);

}  // namespace metal_sim

#endif  // MLX_TVM_FFI_TESTS_METAL_SIM_REPORT_H_
