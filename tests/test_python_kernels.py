"""Python functions as kernels: nothing that waits for one waits for ever."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu

# A kernel slower than Python's switch of threads, so that who waits is waiting while it asks for
# Python's lock.
START = """
import sys, threading
import mlx.core as mx
import numpy as np
import tvm_ffi
import mlx_tvm_ffi as mtf

def kernel(x, y):
    total = 0
    for i in range(400_000):
        total += i
    np.from_dlpack(y)[...] = np.from_dlpack(x) + 1

add_one = mtf.op(kernel, outputs=lambda x: x, name="add_one")
x = mx.array([1.0, 2.0, 3.0])
y = add_one(x)
"""

WAITS = {
    "eval": "mx.eval(y)",
    "async_eval": "mx.async_eval(y); mx.eval(y)",
    "tolist": "assert y.tolist() == [2, 3, 4]",
    "item": "assert y.sum().item() == 9",
    "item of the result": "assert add_one(mx.array(1.0)).item() == 2",
    "bool": "assert add_one(mx.array(1.0))",
    "numpy": "assert np.array(y).tolist() == [2, 3, 4]",
    "numpy.asarray": "assert np.asarray(y).tolist() == [2, 3, 4]",
    "memoryview": "assert memoryview(y).tolist() == [2, 3, 4]",
    "repr": "assert repr(y) == 'array([2, 3, 4], dtype=float32)'",
    "str": "str(y)",
    "dlpack": "assert np.from_dlpack(y).tolist() == [2, 3, 4]",
    "tvm_ffi.from_dlpack": "assert np.from_dlpack(tvm_ffi.from_dlpack(y)).tolist() == [2, 3, 4]",
    "direct call": "tvm_ffi.convert(lambda t: np.from_dlpack(t).tolist())(y)",
    "synchronize": "mx.async_eval(y); mx.synchronize()",
    "async_eval and tolist": "mx.async_eval(y); assert y.tolist() == [2, 3, 4]",
    "async_eval and numpy": "mx.async_eval(y); assert np.array(y).tolist() == [2, 3, 4]",
    "async_eval and repr": "mx.async_eval(y); repr(y)",
    "async_eval and direct call": (
        "mx.async_eval(y); tvm_ffi.convert(lambda t: np.from_dlpack(t).tolist())(y)"
    ),
    "async_eval and memoryview": "mx.async_eval(y); memoryview(y)",
    "async_eval and another op": "mx.async_eval(y); assert add_one(y).tolist() == [3, 4, 5]",
    "async_eval and exit": "mx.async_eval(y)",
    "pickle": "import pickle; pickle.dumps(y)",
    "iteration": "assert [v.item() for v in y] == [2, 3, 4]",
    "compile": "assert mx.compile(lambda x: add_one(x) * 2)(x).tolist() == [4, 6, 8]",
    "save to a file": "mx.save(open('a.npy', 'wb'), y)",
    "savez": "mx.savez('a.npz', y)",
    "save_safetensors": "mx.save_safetensors('a.safetensors', {'y': y})",
    "clear_streams": "mx.async_eval(y); mx.clear_streams()",
    "many in flight": (
        "ys = [add_one(x + i) for i in range(200)]\\n"
        "for y in ys: mx.async_eval(y)\\n"
        "assert [y[0].item() for y in ys] == [2 + i for i in range(200)]"
    ),
    "a chain": "for _ in range(100): y = add_one(y)\\nassert y.tolist() == [102, 103, 104]",
    "dropped while it runs": "mx.async_eval(y); del y, add_one, kernel; mx.synchronize()",
    "an op inside a kernel": (
        "def outer(a, b): mx.synchronize; np.from_dlpack(b)[...] = np.from_dlpack(a) * 2\\n"
        "op = mtf.op(outer, outputs=lambda a: a)\\n"
        "assert op(add_one(op(x))).tolist() == [6, 10, 14]"
    ),
    "threads": (
        "def work():\\n"
        "    with mx.stream(mx.new_stream(mx.cpu)):\\n"
        "        for _ in range(20): assert add_one(mx.ones(3)).tolist() == [2, 2, 2]\\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\\n"
        "[t.start() for t in threads]; [t.join() for t in threads]"
    ),
}


@pytest.mark.parametrize("wait", WAITS)
def test_waiting(run_python, wait):
    run_python(START + WAITS[wait].replace("\\n", "\n"), limit=60)


@pytest.mark.parametrize("evaluate", ["", "mx.async_eval(y)"])
def test_save_which_waits_with_pythons_lock(run_python, evaluate):
    code = "mx.save('a.npy', y)\nassert mx.load('a.npy').tolist() == [2, 3, 4]"
    run_python(f"{START}{evaluate}\n{code}", limit=60)


# A kernel runs on its stream's thread, with its stream as scope: what it makes must not go there.
INSIDE = {
    "an op": "assert add_one(mx.zeros(3)).tolist() == [1, 1, 1]",
    "a scope that waits": "with mtf.stream(wait=True): assert add_one(x).tolist() == [2, 3, 4]",
    "a lazy array of another stream": "direct(mx.sin(mx.ones(3)))",
    "a lazy array of its stream": "refused(lambda: direct(lazy))",
    "an array with two owners, beside another kernel": (
        "direct(shared)\n    barrier.wait()\n    direct(shared)"
    ),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_what_a_kernel_does(run_python, inside):
    code = f"""
own, other = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)
direct = tvm_ffi.convert(lambda t: None)
lazy = mx.add(x, 1, stream=own)
shared = mx.ones(4)
view = shared[:]
mx.eval(shared, view)
streams = 2 if "barrier" in {INSIDE[inside]!r} else 1
barrier = threading.Barrier(streams)

def refused(evaluate):
    try:
        evaluate()
    except RuntimeError as error:
        assert "expected a" in str(error) and "would wait for itself" in str(error), error
    else:
        raise AssertionError("no error")

def outer(a, b):
    {INSIDE[inside]}
    np.from_dlpack(b)[...] = np.from_dlpack(a) * 2

op = mtf.op(outer, outputs=lambda a: a)
ys = [op(x, stream=stream) for stream in (own, other)[:streams]]
mx.eval(ys)
assert all(y.tolist() == [2, 4, 6] for y in ys)
"""
    run_python(START + code, limit=60)


def test_an_error_is_raised_by_async_eval(run_python):
    code = """
def broken(x, y):
    raise KeyError("no such thing")
op = mtf.op(broken, outputs=lambda x: x)
z = op(y)
for _ in range(2):
    try:
        mx.async_eval(mx.exp(x), z)
    except RuntimeError as error:
        assert "op broken]" in str(error) and "no such thing" in str(error), error
    else:
        raise SystemExit("no error")
mx.synchronize()
assert y.tolist() == [2, 3, 4]
"""
    run_python(START + code, limit=60)


def test_a_kernels_exception_names_it(run_python):
    code = """
def broken(x, y):
    raise KeyError("no such thing")
op = mtf.op(broken, outputs=lambda x: x)
try:
    mx.eval(op(x))
except Exception as error:
    assert "op broken]" in str(error) and "no such thing" in str(error), error
else:
    raise SystemExit("no error")
assert y.tolist() == [2, 3, 4]
"""
    run_python(START + code, limit=60)
