// The op for Python: import swish; swish.swish(x, beta=1.5, stream=mx.cpu)
#include <mlx_tvm_ffi/pybind11.h>

#include "swish.h"

namespace py = pybind11;

PYBIND11_MODULE(swish, module) {
  mlx_tvm_ffi::TranslateErrorsOfModule();
  module.def("swish", &Swish, "Compute x * sigmoid(beta * x).", py::arg("x"),
             py::arg("beta") = 1.0F, py::kw_only(), py::arg("stream") = py::none());
}
