/*!
 * \file metal_encoder.h
 * \brief The one place that knows MLX's private parts: its Metal encoder's members, behind names.
 *
 * MLX's encoder is shared with kernels that encode on it directly, so its hazard tracking has to be
 * told what they read and write. The public calls that tell it also bind a buffer each; these do
 * not. A member that MLX renames or retypes is a compile error in the list below. Then read MLX's
 * device.h and device.cpp again, mend this file, and run the Metal tests before widening the range.
 */
#ifndef MLX_TVM_FFI_BACKEND_METAL_ENCODER_H_
#define MLX_TVM_FFI_BACKEND_METAL_ENCODER_H_

#include <mlx/array.h>
#include <mlx/backend/metal/device.h>
#include <mlx/version.h>

#include <cstddef>
#include <unordered_set>

static_assert(MLX_VERSION_NUMERIC >= 32001 && MLX_VERSION_NUMERIC <= 32004,
              "mlx_tvm_ffi knows MLX's Metal encoder from 0.32.1 to 0.32.4: see metal_encoder.h");

namespace mlx_tvm_ffi {

namespace mlx_private {

using mlx::core::array;
using mlx::core::metal::CommandEncoder;

// An explicit instantiation may name a private member; the friend that it defines gives it away.
template <typename Name, typename Name::Type kMember>
struct Reveal {
  friend constexpr typename Name::Type Get(Name) { return kMember; }
};

#define MLX_TVM_FFI_PRIVATE(Name, Member, ...)                                                   \
  struct Name {                                                                                  \
    using Kind = __VA_ARGS__;                                                                    \
    using Type = Kind CommandEncoder::*;                                                         \
    friend constexpr Type Get(Name);                                                             \
  };                                                                                             \
  template struct Reveal<Name, &CommandEncoder::Member> /* MLX changed? See the top of the file. \
                                                         */

MLX_TVM_FFI_PRIVATE(GetRaw, get_command_encoder, MTL::ComputeCommandEncoder*());
MLX_TVM_FFI_PRIVATE(Open, encoder_, NS::SharedPtr<MTL::ComputeCommandEncoder>);
MLX_TVM_FFI_PRIVATE(BufferOps, buffer_ops_, int);
MLX_TVM_FFI_PRIVATE(BufferSizes, buffer_sizes_, std::size_t);
MLX_TVM_FFI_PRIVATE(NeedsBarrier, needs_barrier_, bool);
MLX_TVM_FFI_PRIVATE(PrevInputs, prev_inputs_, std::unordered_set<MTL::Resource*>);
MLX_TVM_FFI_PRIVATE(PrevOutputs, prev_outputs_, std::unordered_set<MTL::Resource*>);
MLX_TVM_FFI_PRIVATE(NextInputs, next_inputs_, std::unordered_set<MTL::Resource*>);
MLX_TVM_FFI_PRIVATE(AllInputs, all_inputs_, std::unordered_set<const void*>);
#undef MLX_TVM_FFI_PRIVATE

// The type of an array's descriptor is private too, so this one is not named but deduced.
template <auto kMember>
struct RevealOwners {
  friend long Owners(const array& owned) { return (owned.*kMember).use_count(); }
};
long Owners(const array& owned);
template struct RevealOwners<&array::array_desc_>;  // MLX changed? See the top of the file.

}  // namespace mlx_private

/*! \brief MLX's live encoder, opened if there is none. Borrowed until MLX ends it: ask at each use.
 */
inline MTL::ComputeCommandEncoder* RawEncoder(mlx::core::metal::CommandEncoder& encoder) {
  return (encoder.*Get(mlx_private::GetRaw{}))();
}

/*! \brief The same, or null where none is open. */
inline MTL::ComputeCommandEncoder* OpenEncoder(mlx::core::metal::CommandEncoder& encoder) {
  return (encoder.*Get(mlx_private::Open{})).get();
}

/*!
 * \brief Ends MLX's encoder, if one is open, and drops declarations of dispatches that went to
 * another: MLX drops those of its own encoder alone, and would open an empty one for the barrier
 * that they ask for.
 */
inline void EndEncoding(mlx::core::metal::CommandEncoder& encoder) {
  encoder.end_encoding();
  (encoder.*Get(mlx_private::PrevInputs{})).clear();
  (encoder.*Get(mlx_private::PrevOutputs{})).clear();
}

/*! \brief Counts dispatches that MLX did not make towards its limit for a command buffer. */
inline void CountDispatches(mlx::core::metal::CommandEncoder& encoder, int dispatches) {
  encoder.*Get(mlx_private::BufferOps{}) += dispatches;
}

/*! \brief Says that the next dispatch reads `array`: MLX's set_input_array without its setBuffer.
 */
inline void DeclareInput(mlx::core::metal::CommandEncoder& encoder, const mlx::core::array& array) {
  const void* buffer = array.buffer().ptr();
  if (buffer == nullptr) return;  // an empty array
  if ((encoder.*Get(mlx_private::AllInputs{})).insert(buffer).second) {
    encoder.*Get(mlx_private::BufferSizes{}) += array.data_size();
  }
  auto* resource = static_cast<MTL::Resource*>(const_cast<void*>(buffer));
  (encoder.*Get(mlx_private::NextInputs{})).insert(resource);
  if ((encoder.*Get(mlx_private::PrevOutputs{})).count(resource) != 0) {
    encoder.*Get(mlx_private::NeedsBarrier{}) = true;
  }
}

/*! \brief Says that the next dispatch writes `array`: MLX's set_output_array without its setBuffer.
 */
inline void DeclareOutput(mlx::core::metal::CommandEncoder& encoder,
                          const mlx::core::array& array) {
  if (array.buffer().ptr() == nullptr) return;
  DeclareInput(encoder, array);
  encoder.register_output_array(array);
}

/*! \brief How many handles share this array: 1 where the caller's is the only one. */
inline long OwnersOf(const mlx::core::array& array) { return mlx_private::Owners(array); }

}  // namespace mlx_tvm_ffi

#endif  // MLX_TVM_FFI_BACKEND_METAL_ENCODER_H_
