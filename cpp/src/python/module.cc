// The extension module: bindings, no logic.
#include <mlx_tvm_ffi/pybind11.h>
#include <pybind11/pybind11.h>

#include "array/py_array.h"
#include "array/py_error.h"
#include "array/py_exchange.h"
#include "python/op_type.h"
#include "python/stream_bindings.h"

PYBIND11_MODULE(_core, module) {
  using namespace mlx_tvm_ffi;
  TranslateErrors();
  InitPyArray();
  InstallExchange();
  BindOp(module);
  module.def("offer_allocator", &OfferAllocator);
  BindStream(module);
  static const PyArrayApi array_api{MLX_VERSION_NUMERIC, AsArray, FromArray, AsStreamOrDevice,
                                    SetPythonError};
  module.attr("array_api") = pybind11::capsule(&array_api, kPyArrayApiName);
}
