"""Kernels that others compiled, as ops on a GPU, against float64: Triton, NVRTC and CuPy."""

from __future__ import annotations

import importlib.util
import os

import mlx.core as mx
import numpy as np
import pytest
import tvm_ffi.cpp

import mlx_tvm_ffi as mtf

pytestmark = pytest.mark.cuda

ROWS, COLUMNS = 67, 1000

# Launches a kernel of a cubin on the stream that tvm-ffi names: a block for each row. Triton's
# kernels take two pointers to scratch memory at the end, which others ignore.
LAUNCHER = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/cubin_launcher.h>
TVM_FFI_EMBED_CUBIN(code)
void Softmax(tvm::ffi::TensorView x, tvm::ffi::TensorView y, int64_t threads, int64_t shared) {
  static auto kernel = TVM_FFI_EMBED_CUBIN_GET_KERNEL(code, "softmax");
  void *from = x.data_ptr(), *to = y.data_ptr(), *none = nullptr;
  int columns = static_cast<int>(x.size(1));
  void* arguments[] = {&from, &to, &columns, &none, &none};
  tvm::ffi::dim3 grid(static_cast<unsigned>(x.size(0))), block(static_cast<unsigned>(threads));
  auto* stream = static_cast<cudaStream_t>(
      TVMFFIEnvGetStream(x.device().device_type, x.device().device_id));
  auto result = kernel.Launch(arguments, grid, block, stream, static_cast<uint32_t>(shared));
  TVM_FFI_CHECK_CUBIN_LAUNCHER_CUDA_ERROR(result);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(softmax, Softmax)
"""

CUDA = """
extern "C" __global__ void softmax(const float* x, float* y, int columns) {
  __shared__ float parts[256];
  x += blockIdx.x * columns;
  y += blockIdx.x * columns;
  auto reduce = [&](float value, auto combine) {
    parts[threadIdx.x] = value;
    for (int step = 128; step > 0; step /= 2) {
      __syncthreads();
      if (threadIdx.x < step) {
        parts[threadIdx.x] = combine(parts[threadIdx.x], parts[threadIdx.x + step]);
      }
    }
    __syncthreads();
    value = parts[0];
    __syncthreads();
    return value;
  };
  float largest = -1e30f, sum = 0;
  for (int i = threadIdx.x; i < columns; i += 256) largest = fmaxf(largest, x[i]);
  largest = reduce(largest, [](float a, float b) { return fmaxf(a, b); });
  for (int i = threadIdx.x; i < columns; i += 256) sum += expf(x[i] - largest);
  sum = reduce(sum, [](float a, float b) { return a + b; });
  for (int i = threadIdx.x; i < columns; i += 256) y[i] = expf(x[i] - largest) / sum;
}
"""

TRITON = """
import triton
import triton.language as tl

@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=-float("inf"))
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(y + row * columns + at, value / tl.sum(value, axis=0), mask=inside)
"""


def load_cubin(name, cubin):
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return tvm_ffi.cpp.load_inline(
        name,
        cpp_sources=LAUNCHER,
        embed_cubin={"code": cubin},
        extra_include_paths=[f"{home}/include"],
        backend="cuda",
    )


def check(softmax, **attributes):
    op = mtf.op(softmax, outputs=lambda x, **_: x)
    x = mx.random.normal((ROWS, COLUMNS))
    mx.eval(x)
    with np.errstate(all="raise"):
        wide = np.array(x, dtype=np.float64) * 3
        expected = np.exp(wide - wide.max(axis=1, keepdims=True))
        expected /= expected.sum(axis=1, keepdims=True)
    for _ in range(3):
        y = op(x * 3, **attributes)
        for _ in range(60):  # in turn with MLX's own, in more than one graph
            y = mx.log(y)
            y = op(y - 5, **attributes)
        np.testing.assert_allclose(np.array(y), expected, rtol=2e-4, atol=1e-9)
    y = mx.zeros_like(x)
    softmax(x * 3, y, *attributes.values())
    np.testing.assert_allclose(np.array(y), expected, rtol=1e-4, atol=1e-9)


def test_triton(tmp_path):
    triton = pytest.importorskip("triton", reason="needs Triton")
    path = tmp_path / "softmax.py"  # Triton reads the source of its kernels
    path.write_text(TRITON)
    spec = importlib.util.spec_from_file_location("triton_softmax", path)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    source = triton.compiler.ASTSource(
        kernels.softmax,
        signature={"x": "*fp32", "y": "*fp32", "columns": "i32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": 1024},
    )
    kernel = triton.compile(source)
    module = load_cubin("test_triton_softmax", kernel.asm["cubin"])
    threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
    check(module.softmax, threads=threads, shared=shared)


def test_nvrtc():
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")
    from tvm_ffi.cpp.nvrtc import nvrtc_compile

    module = load_cubin("test_nvrtc_softmax", nvrtc_compile(CUDA, arch="sm_90"))
    check(module.softmax, threads=256, shared=0)


def test_cupy():
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    kernel = cupy.RawKernel(CUDA, "softmax", options=("--std=c++17",))

    class Handle:
        """A stream by CUDA's stream protocol."""

        def __init__(self, address):
            self.address = address

        def __cuda_stream__(self):
            return 0, self.address

    def softmax(x, y):
        with cupy.cuda.Stream.from_external(Handle(tvm_ffi.get_raw_stream(x.device))):
            kernel((x.shape[0],), (256,), (x.data_ptr(), y.data_ptr(), np.int32(x.shape[1])))

    check(tvm_ffi.convert(softmax))
