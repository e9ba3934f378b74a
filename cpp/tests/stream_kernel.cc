// What a kernel does with the stream interface. Linked to tvm-ffi only: neither MLX nor us.
#include <mlx_tvm_ffi/stream.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/function.h>

#include <memory>

namespace {

using mlx_tvm_ffi::StreamRef;

DLDevice Device(int type, int id) { return {static_cast<DLDeviceType>(type), id}; }

int64_t Address(void* pointer) { return reinterpret_cast<int64_t>(pointer); }

// The handle of the current stream, borrowed.
int64_t Current(int type, int id) {
  return Address(mlx_tvm_ffi::CurrentStream(Device(type, id)).get());
}

int64_t Innermost() { return Address(mlx_tvm_ffi::InnermostStream().get()); }

using Handles = tvm::ffi::Tuple<int64_t, int64_t, int64_t>;

// Two dependent dispatches on the current stream; gives encoder, device and queue.
Handles Dispatch(int type, int id) {
  StreamRef stream = mlx_tvm_ffi::CurrentStream(Device(type, id));
  mlx_tvm_ffi::EncoderScope scope(stream);
  stream.Barrier();
  return Handles(Address(scope.encoder()), Address(stream.GetDevice()),
                 Address(stream.GetDispatchQueue()));
}

void CommandBuffer(int type, int id) {
  mlx_tvm_ffi::CommandBufferScope scope(mlx_tvm_ffi::CurrentStream(Device(type, id)));
}

void Keep(int type, int id) {
  mlx_tvm_ffi::CurrentStream(Device(type, id)).Keep(std::make_shared<int>(1));
}

bool EncodeOnQueue(int type, int id) {
  bool encoded = false;
  mlx_tvm_ffi::EncodeOn(mlx_tvm_ffi::CurrentStream(Device(type, id)), [&] { encoded = true; });
  return encoded;
}

int64_t Environment(int type, int id) { return Address(TVMFFIEnvGetStream(type, id)); }

void SetEnvironment(int type, int id, int64_t stream) {
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvSetStream(type, id, reinterpret_cast<void*>(stream), nullptr));
}

#ifdef HAS_ADDED
// A member that only a later version has.
void Added(int type, int id) {
  StreamRef stream = mlx_tvm_ffi::CurrentStream(Device(type, id));
  mlx_tvm_ffi::detail::Call(stream.get()->table, &mtf_stream_table::added, "Added", stream.get());
}
#endif

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(current, Current)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(innermost, Innermost)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dispatch, Dispatch)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(command_buffer, CommandBuffer)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(keep, Keep)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(encode_on_queue, EncodeOnQueue)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(environment, Environment)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_environment, SetEnvironment)
#ifdef HAS_ADDED
TVM_FFI_DLL_EXPORT_TYPED_FUNC(added, Added)
#endif
