// A stream of a framework that is not MLX: it records what is asked of it. Linked to tvm-ffi only.
#include <mlx_tvm_ffi/stream.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

namespace {

using mlx_tvm_ffi::StreamRef;
using mlx_tvm_ffi::StreamScope;

std::atomic<int64_t> alive{0};

class ForeignStream final : public mlx_tvm_ffi::StreamInterface {
 public:
  ForeignStream(DLDevice device, void* encoder) : device_(device), encoder_(encoder) { ++alive; }
  ~ForeignStream() override { --alive; }

  DLDevice device() const override { return device_; }
  void* AcquireEncoder() override {
    Record("acquire");
    return encoder_;
  }
  void ReleaseEncoder() override { Record("release"); }
  void Barrier() override { Record("barrier"); }
  void Enter() override { Record("enter"); }
  void Leave() override { Record("leave"); }
  void* GetDevice() override { return reinterpret_cast<void*>(0xd); }
  void* GetDispatchQueue() override { return queue; }

  // The call that raises, and what.
  std::string raises_in;
  std::string raises;
  void* queue = nullptr;

  std::string Calls() {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

 private:
  void Record(const char* call) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      calls_ += (calls_.empty() ? "" : " ") + std::string(call);
    }
    if (raises_in != call) return;
    if (raises == "invalid_argument") throw std::invalid_argument("a bad argument");
    if (raises == "runtime_error") throw std::runtime_error("a bad state");
    if (raises == "logic_error") throw std::logic_error("a bug");
    if (raises == "int") throw 1;
    TVM_FFI_THROW(IndexError) << "an index";
  }

  DLDevice device_;
  void* encoder_;
  std::mutex mutex_;
  std::string calls_;
};

StreamRef Borrow(void* stream) { return StreamRef::Share(static_cast<mtf_stream*>(stream)); }

ForeignStream& Mine(void* stream) {
  auto* mine = dynamic_cast<ForeignStream*>(mlx_tvm_ffi::Implementation(Borrow(stream)));
  if (mine == nullptr) TVM_FFI_THROW(TypeError) << "not a stream of this library";
  return *mine;
}

DLDevice Device(int type, int id) { return {static_cast<DLDeviceType>(type), id}; }

// The caller owns the reference that it gets, until release_stream.
void* MakeStream(int type, int id, int64_t encoder) {
  auto* handle = reinterpret_cast<void*>(encoder);
  return mlx_tvm_ffi::MakeStream(std::make_shared<ForeignStream>(Device(type, id), handle))
      .release();
}

void ReleaseStream(void* stream) { StreamRef::Steal(static_cast<mtf_stream*>(stream)); }

void* ExchangeDefault(int type, int id, void* stream) {
  return mlx_tvm_ffi::ExchangeDefaultStream(Device(type, id), Borrow(stream)).release();
}

bool OfferDefault(int type, int id, void* stream) {
  return mlx_tvm_ffi::OfferDefaultStream(Device(type, id), Borrow(stream));
}

// C++ scopes, to be left on whatever thread and in whatever order a test likes.
void* Enter(void* stream) { return new StreamScope(Borrow(stream)); }
void Leave(void* scope) { delete static_cast<StreamScope*>(scope); }

int64_t Alive() { return alive; }
std::string Calls(void* stream) { return Mine(stream).Calls(); }
void RaiseIn(void* stream, const std::string& call, const std::string& what) {
  Mine(stream).raises_in = call;
  Mine(stream).raises = what;
}
void SetQueue(void* stream, int64_t queue) { Mine(stream).queue = reinterpret_cast<void*>(queue); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_stream, MakeStream)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(release_stream, ReleaseStream)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(exchange_default, ExchangeDefault)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(offer_default, OfferDefault)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(enter, Enter)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(leave, Leave)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(alive, Alive)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(calls, Calls)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(raise_in, RaiseIn)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_queue, SetQueue)
