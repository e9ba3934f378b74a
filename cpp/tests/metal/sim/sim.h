/*!
 * \file What a test sees of the simulated Metal. Metal itself is reached through metal-cpp.
 * Thread-safe throughout.
 */
#ifndef MLX_TVM_FFI_TESTS_METAL_SIM_SIM_H_
#define MLX_TVM_FFI_TESTS_METAL_SIM_SIM_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace metal_sim {

/*! \brief In which of the orders that Metal allows work runs. */
enum class Order { kEncoded, kReverse, kRandom };

struct Settings {
  std::atomic<Order> dispatches;  // between two barriers of a concurrent encoder
  std::atomic<Order> encoders;    // that no fence, event or completion orders
  std::atomic<bool> races;        // report accesses of one buffer that nothing orders
  std::atomic<int64_t> delay_us;  // the GPU starts each command buffer that late
  std::atomic<int64_t> seed;      // of Order::kRandom
  std::atomic<int64_t> failures;  // so many command buffers from now fail on the GPU
};

/*! \brief The settings. At load METAL_SIM_ORDER, METAL_SIM_ENCODER_ORDER (reverse, random),
 *  METAL_SIM_RACES, METAL_SIM_DELAY_US and METAL_SIM_SEED of the environment are taken. */
Settings& GetSettings();
Order ParseOrder(const std::string& name);

/*! \brief While held, committed work does not start. */
void HoldGpu(bool hold);

/*! \brief What was used against Metal's rules since the last call, races and leaks included. */
std::vector<std::string> TakeErrors();
/*! \brief Everything encoded, committed and executed since the last call, in order. */
std::vector<std::string> TakeLog();

/*! \brief Calls counted since ResetCounts: encoders, commits, waits, barriers, ... */
std::map<std::string, long> Counts();
/*! \brief Objective-C messages by selector since ResetCounts; gpu: those of the GPU's threads,
 *  completion handlers included, else all others. */
std::map<std::string, long> Messages(bool gpu);
void ResetCounts();

/*! \brief Wait until committed work is done and let go of, unless the GPU is held. */
void WaitUntilIdle();

/*! \brief Number of live objects by class name. */
std::map<std::string, long> LiveObjects();

/*! \brief Report a use against the rules. */
[[gnu::format(printf, 1, 2)]] void Fault(const char* format, ...);

}  // namespace metal_sim

#endif  // MLX_TVM_FFI_TESTS_METAL_SIM_SIM_H_
