// The simulator for Python: a tvm-ffi library.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <string>
#include <utility>

#include "sim.h"

// Of the stand-in for MLX's Metal half, where it is in the process.
extern "C" [[gnu::weak]] void mlx_standin_set_limits(int max_ops, int max_mb);

namespace {

namespace ffi = tvm::ffi;

ffi::Array<ffi::String> ToArray(const std::vector<std::string>& values) {
  ffi::Array<ffi::String> result;
  for (auto& value : values) result.push_back(value);
  return result;
}

ffi::Map<ffi::String, int64_t> ToMap(const std::map<std::string, long>& values) {
  ffi::Map<ffi::String, int64_t> result;
  for (auto& [name, value] : values) result.Set(name, value);
  return result;
}

void Configure(const ffi::String& dispatches, const ffi::String& encoders, bool races,
               int64_t delay_us, int64_t failures) {
  metal_sim::Settings& settings = metal_sim::GetSettings();
  settings.dispatches = metal_sim::ParseOrder(dispatches);
  settings.encoders = metal_sim::ParseOrder(encoders);
  settings.races = races;
  settings.delay_us = delay_us;
  settings.failures = failures;
}

bool SetLimits(int max_ops, int max_mb) {
  if (mlx_standin_set_limits == nullptr) return false;
  mlx_standin_set_limits(max_ops, max_mb);
  return true;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(configure, Configure);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hold, metal_sim::HoldGpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reset_counts, metal_sim::ResetCounts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_limits, SetLimits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take_errors, [] { return ToArray(metal_sim::TakeErrors()); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take_log, [] { return ToArray(metal_sim::TakeLog()); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(counts, [] { return ToMap(metal_sim::Counts()); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(live_objects, [] {
  metal_sim::WaitUntilIdle();
  return ToMap(metal_sim::LiveObjects());
});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(messages, [](bool gpu) { return ToMap(metal_sim::Messages(gpu)); });
