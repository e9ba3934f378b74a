"""Each error: its kind and text, and that everything else works on after it."""

from __future__ import annotations

import functools
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import mlx.core as mx
import numpy as np
import pytest
import tvm_ffi

import mlx_tvm_ffi as mtf

pytestmark = pytest.mark.cpu

X = mx.array([1.0, 2.0, 3.0])
VECTOR = mtf.ShapeDtype((3,), mx.float32)


@pytest.fixture
def kernels(library):
    module = library("kernels")
    yield module
    module.open_gate()
    module.kept()


@pytest.fixture(autouse=True)
def everything_works_on(kernels):
    """After the test: the stream, others, direct calls, and what is scheduled next."""
    yield
    op = mtf.op(kernels.add_one, outputs=lambda x: x)
    for stream in (None, mx.new_stream(mx.cpu)):
        assert op(op(X.reshape(3, 1).T, stream=stream), stream=stream).tolist() == [[3, 4, 5]]
    y = mx.exp(X)
    mx.async_eval(y)
    np.testing.assert_allclose(np.array(y), np.exp(np.array(X)), rtol=1e-6)
    assert kernels.fresh(X).tolist() == [1, 2, 3]
    mx.synchronize()


def settle(*streams):
    """Let MLX forget an error: each stream that it passed through may raise it once."""
    for stream in (None, *streams):
        for _ in range(2):
            with suppress(RuntimeError):
                mx.synchronize(stream or mx.default_stream(mx.cpu))


@contextmanager
def raises(kind, *texts):
    """Expect an error of just this kind, with all of these texts in it."""
    pattern = "".join(f"(?=.*{text})" for text in texts)
    with pytest.raises(kind, match=f"(?s){pattern}") as raised:
        yield
    assert raised.type is kind


# --- A kernel raises.


@pytest.mark.parametrize(
    "kind", ["ValueError", "TypeError", "RuntimeError", "IndexError", "InternalError", "OwnError"]
)
def test_a_kernels_error_has_its_kind_message_and_name(kernels, kind):
    op = mtf.op(kernels.fail, outputs=lambda x, **_: x, name="rms_norm")
    with raises(RuntimeError, rf"\[mlx_tvm_ffi\.op rms_norm\] {kind}: no good: 42%s"):
        mx.eval(op(X, kind=kind, message="no good: 42%s"))


def test_a_kernels_error_has_its_own_kind_in_a_direct_call(kernels):
    with raises(ValueError, "no good"):
        kernels.fail_directly(X, "ValueError", "no good")
    with raises(IndexError, "no good"):
        kernels.fail_directly(X, "IndexError", "no good")


def test_a_standard_exception(kernels):
    op = mtf.op(kernels.throw_standard, outputs=VECTOR)
    with raises(RuntimeError, r"\[mlx_tvm_ffi\.op .*\] InternalError: a vector's number"):
        mx.eval(op(X))


def test_an_exception_that_is_no_standard_one(kernels):
    op = mtf.op(kernels.throw_number, outputs=VECTOR, name="thrower")
    with raises(RuntimeError, r"\[mlx_tvm_ffi\.op thrower\] .*not a std::exception"):
        mx.eval(op(X))


def test_a_python_kernels_error():
    def failing(_x, _y):
        raise KeyError("missing")

    with raises(RuntimeError, r"\[mlx_tvm_ffi\.op failing\] KeyError: 'missing'"):
        mx.eval(mtf.op(failing, outputs=VECTOR)(X))


def test_a_kernel_with_other_parameters(kernels):
    with raises(RuntimeError, r"\[mlx_tvm_ffi\.op adder\] TypeError", "3", "2"):
        mx.eval(mtf.op(kernels.add, outputs=VECTOR, name="adder")(X))
    with raises(RuntimeError, r"\[mlx_tvm_ffi\.op scaler\] TypeError", "float"):
        mx.eval(mtf.op(kernels.scale, outputs=VECTOR, name="scaler")(X, factor="two"))


WAYS = {
    "eval": mx.eval,
    "tolist": mx.array.tolist,
    "repr": repr,
    "direct call": tvm_ffi.get_global_func("mlx_tvm_ffi.same"),
    "eval of what depends on it": lambda array: mx.eval(mx.exp(array) + 1),
}


# Older MLX throws through CPython's buffer code there, which ends the process.
if mx.__version__ >= "0.32.4":
    WAYS["memoryview"] = memoryview


@pytest.mark.parametrize("way", WAYS)
def test_an_error_is_raised_by_whatever_evaluates(kernels, way):
    op = mtf.op(kernels.fail, outputs=VECTOR)
    with raises(RuntimeError, "no good"):
        WAYS[way](op(X, kind="ValueError", message="no good"))


@pytest.mark.parametrize(
    ("dtype", "spoilt"),
    [(mx.float32, np.nan), (mx.float16, np.nan), (mx.complex64, np.nan), (mx.int8, -1)],
)
def test_a_failed_output_holds_nothing_like_a_result(kernels, dtype, spoilt):
    # MLX counts it as evaluated: who reads it again may get no error.
    y = mtf.op(kernels.fail, outputs=mtf.ShapeDtype((3,), dtype))(X, kind="ValueError", message="m")
    with suppress(RuntimeError):
        mx.eval(y)
    settle()
    with suppress(RuntimeError):
        mx.eval(y)
        np.testing.assert_array_equal(np.array(y).real, [spoilt] * 3)


@pytest.mark.parametrize("result", [lambda x: x, lambda x: [x, x]])
def test_outputs_that_are_returned_and_not_filled(result):
    def kernel(x, _):
        return result(x)

    with raises(RuntimeError, "TypeError: expected a kernel that fills", "returns ffi"):
        mx.eval(mtf.op(kernel, outputs=VECTOR)(X))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise KeyError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of tvm-ffi
@pytest.mark.parametrize("error", [ValueError("\ud800"), Unprintable()])
def test_an_exception_without_a_text(error):
    def kernel(_, __) -> None:
        raise error

    with raises(RuntimeError, r"op kernel\] RuntimeError: an exception whose text is not Unicode"):
        mx.eval(mtf.op(kernel, outputs=VECTOR)(X))


def test_an_error_after_async_eval_is_raised_by_what_comes_next(kernels, add_one):
    op = mtf.op(kernels.fail, outputs=VECTOR)
    for _ in range(10):
        with raises(RuntimeError, "no good"):
            mx.async_eval(op(X, kind="ValueError", message="no good"))
            mx.synchronize()
            mx.eval(add_one(X))


@pytest.mark.parametrize("bad_first", [True, False])
@pytest.mark.parametrize("stream", [None, "other"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_other_arrays_of_the_evaluation_are_right(
    kernels, add_one, bad_first, stream, asynchronous
):
    failing = mtf.op(kernels.fail, outputs=VECTOR)
    stream = stream and mx.new_stream(mx.cpu)
    for _ in range(10):
        good = [add_one(mx.exp(X) * i) for i in range(5)] + [mx.exp(X), add_one(X, stream=stream)]
        bad = failing(X, kind="ValueError", message="no good", stream=stream)
        arrays = [bad, *good] if bad_first else [*good, bad]
        with raises(RuntimeError, "no good"):
            if asynchronous:
                mx.async_eval(*arrays)
                mx.synchronize(stream or mx.default_stream(mx.cpu))
            mx.eval(*arrays, add_one(X, stream=stream))
        settle(stream)
        for i in range(5):
            assert mx.allclose(good[i], mx.exp(X) * i + 1)
        assert mx.allclose(good[5], mx.exp(X))
        assert good[6].tolist() == [2, 3, 4]


def test_an_error_is_raised_again_by_a_new_call(kernels):
    op = mtf.op(kernels.fail, outputs=VECTOR)
    for _ in range(5):
        with raises(RuntimeError, "no good"):
            mx.eval(op(X, kind="ValueError", message="no good"))


def test_many_errors(kernels, add_one):
    # Each may leave a trace in MLX's count of running tasks, which must not stop it at last.
    op = mtf.op(kernels.fail, outputs=VECTOR)
    for i in range(500):
        with raises(RuntimeError, "no good"):
            mx.eval(op(X, kind="ValueError", message="no good"), add_one(X))
        if i % 50 == 0:
            assert sum(add_one(X) for _ in range(50)).tolist() == [100, 150, 200]


def test_what_depends_on_a_failed_array_fails(kernels, add_one):
    op = mtf.op(kernels.fail, outputs=VECTOR)
    with raises(RuntimeError, "no good"):
        mx.eval(mx.exp(add_one(op(X, kind="ValueError", message="no good")) * 2))


def test_an_error_inside_compile(kernels, add_one):
    op = mtf.op(kernels.fail, outputs=VECTOR)
    function = mx.compile(lambda x: add_one(op(add_one(x), kind="ValueError", message="no good")))
    for _ in range(3):
        with raises(RuntimeError, "no good"):
            mx.eval(function(X))


def test_an_error_on_another_thread(kernels, add_one):
    op = mtf.op(kernels.fail, outputs=VECTOR)

    def work() -> None:
        for _ in range(10):
            with raises(RuntimeError, "no good"):
                mx.eval(op(X, kind="ValueError", message="no good"))
            assert add_one(X).tolist() == [2, 3, 4]
        mx.clear_streams()

    mx.eval(X)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_an_error_nobody_waits_for_does_not_end_the_process(run_python, library_path):
    run_python(f"""
import mlx.core as mx, tvm_ffi, mlx_tvm_ffi as mtf, threading
kernels = tvm_ffi.load_module({str(library_path("kernels"))!r})
x = mx.zeros(3)
mx.eval(x)
def work():
    mx.async_eval(mtf.op(kernels.throw_number, outputs=x)(x))
    mx.async_eval(mtf.op(kernels.fail, outputs=x)(x, kind="E", message="m"))
thread = threading.Thread(target=work)
thread.start()
thread.join()
work()
""")


# --- What a kernel returns.


def returning(kernel, outputs=VECTOR):
    return mtf.op(kernel, outputs=outputs, arg_spec=["args"], name="returns")(X)


@pytest.mark.parametrize(
    ("outputs", "texts"),
    [
        (mtf.ShapeDtype((4,), mx.float32), [r"returns float32\[4\] for output 0", r"float32\[3\]"]),
        (mtf.ShapeDtype((3,), mx.int32), [r"returns int32\[3\] for output 0", r"float32\[3\]"]),
        (mtf.ShapeDtype((3,), mx.complex64), [r"returns complex64\[3\]", r"float32\[3\]"]),
        (mtf.ShapeDtype((1, 3), mx.float32), [r"returns float32\[1, 3\]", r"float32\[3\]"]),
    ],
)
@pytest.mark.parametrize("kernel", ["fresh", "foreign", "same"])
def test_a_returned_output_is_checked(kernels, kernel, outputs, texts):
    with raises(RuntimeError, r"\[mlx_tvm_ffi\.op returns\] ValueError: expected", *texts):
        mx.eval(returning(kernels[kernel], outputs))


def test_the_number_of_returned_outputs_is_checked(kernels):
    with raises(RuntimeError, "ValueError: expected a kernel that returns 1 tensors, got 2"):
        mx.eval(returning(kernels.twice))
    with raises(RuntimeError, "TypeError: expected a kernel that returns 2 tensors, got"):
        mx.eval(returning(kernels.fresh, [VECTOR, VECTOR]))
    with raises(RuntimeError, "ValueError: expected a kernel that returns 3 tensors, got 2"):
        mx.eval(returning(kernels.twice, [VECTOR] * 3))


@pytest.mark.parametrize("value", [None, 5, "text"])
def test_a_returned_value_that_is_no_tensor(value):
    with raises(RuntimeError, "TypeError: expected a kernel that returns a tensor for output 0"):
        mx.eval(returning(lambda _: value))
    with raises(RuntimeError, "TypeError: expected a kernel that returns a tensor for output 1"):
        mx.eval(returning(lambda x: [x, value], [VECTOR, VECTOR]))


def test_scratch_that_mlx_cannot_give(kernels):
    with raises(RuntimeError, "NotImplementedError: .*expected one of MLX's, got float8_e4m3fn"):
        mx.eval(returning(kernels.allocate_float8))


# --- Tensors that a kernel keeps.


@pytest.mark.parametrize(
    ("kernel", "text"),
    [("keep_output", "output 0"), ("keep_input", "input 0"), ("keep_and_fail", "kept and failed")],
)
@pytest.mark.parametrize("drop_first", [True, False])
def test_a_kernel_that_keeps_a_tensor(kernels, kernel, text, drop_first):
    op = mtf.op(kernels[kernel], outputs=VECTOR, name="keeper")
    y = op(X * 1)
    with raises(RuntimeError, r"\[mlx_tvm_ffi\.op keeper\]", text):
        mx.eval(y)
    if drop_first:
        del y
        gc.collect()
    mx.eval([mx.zeros(3) + i for i in range(16)])
    (kept,) = kernels.kept()
    assert tuple(kept.shape) == (3,)
    assert np.isnan(np.from_dlpack(kept)).all() == (kernel != "keep_input")


def test_a_python_kernel_that_keeps_a_tensor(kernels):
    kept = []
    op = mtf.op(lambda x, y: kept.append(y) or kernels.add_one(x, y), outputs=VECTOR)
    with raises(RuntimeError, "it kept output 0. Copy what must outlive the call."):
        mx.eval(op(X))
    assert np.isnan(np.from_dlpack(kept[0])).all()


def test_a_kernel_that_keeps_what_it_returns(kernels):
    with raises(RuntimeError, "it kept output 0"):
        mx.eval(returning(kernels.fresh_and_kept))
    assert np.isnan(np.from_dlpack(kernels.kept()[0])).all()


def test_a_kernel_may_keep_scratch(kernels):
    def function(x, y) -> None:
        kernels.keep(kernels.fresh(x))
        kernels.add_one(x, y)

    assert mtf.op(function, outputs=VECTOR)(X).tolist() == [2, 3, 4]
    mx.eval([mx.zeros(3) + i for i in range(16)])
    assert np.from_dlpack(kernels.kept()[0]).tolist() == [1, 2, 3]


# --- Outputs.


class Shaped:
    """Something with a shape and a dtype, of whatever kind."""

    def __init__(self, shape, dtype=mx.float32) -> None:
        self.shape, self.dtype = shape, dtype


WHERE = r"\[mlx_tvm_ffi\.op kernel\] outputs: expected"
BAD_OUTPUTS = {
    "no spec": (5, TypeError, ["something with .shape and .dtype", "got int"]),
    "None": (None, TypeError, ["got NoneType"]),
    "a string": ("ab", TypeError, ["got str"]),
    "a sequence of no specs": ([5], TypeError, ["things with .shape and .dtype, got int"]),
    "an empty sequence": ([], ValueError, ["at least one, got none"]),
    "negative": (Shaped((2, -3)), ValueError, [r"from 0 to 2\^31 - 1, got -3"]),
    "too large a dimension": (Shaped((1 << 31,)), ValueError, ["got 2147483648"]),
    "beyond 64 bits": (Shaped((1 << 70,)), ValueError, ["got 1180591620717411303424"]),
    "too large together": (Shaped((1 << 30,) * 3), ValueError, [r"less than 2\^62 bytes"]),
    "of 5000 digits": (Shaped((10**5000,)), ValueError, [r"from 0 to 2\^31 - 1, got int"]),
    "a shape of floats": (Shaped((2.5,)), TypeError, ["dimensions that are integers, got float"]),
    "a shape that is a number": (Shaped(3), TypeError, ["a shape that is a sequence", "got int"]),
    "a shape that is a string": (Shaped("3"), TypeError, ["a shape that is a sequence"]),
    "NumPy's dtype": (np.zeros(3), TypeError, ["a dtype of mlx.core, got"]),
    "a dtype's name": (Shaped((3,), "float32"), TypeError, ["a dtype of mlx.core, got str"]),
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_a_bad_output_is_an_error_when_the_op_is_made(kernels, name):
    outputs, kind, texts = BAD_OUTPUTS[name]
    with raises(kind, WHERE, *texts):
        mtf.op(kernels.add_one, outputs=outputs, name="kernel")


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_a_bad_output_of_a_callable_is_an_error_of_the_call(kernels, name):
    outputs, kind, texts = BAD_OUTPUTS[name]
    op = mtf.op(kernels.add_one, outputs=lambda _: outputs, name="kernel")
    with raises(kind, WHERE, *texts):
        op(X)
    with raises(kind, WHERE, *texts):
        mx.compile(op)(X)


def test_an_error_of_the_callable_is_its_own(kernels):
    def outputs(_):
        raise LookupError("mine")

    with raises(LookupError, "mine"):
        mtf.op(kernels.add_one, outputs=outputs)(X)


class Failing(list):
    """A sequence whose methods fail."""

    def __init__(self, method) -> None:
        super().__init__([1])
        self.method = method

    def __len__(self):
        if self.method == "len":
            raise KeyboardInterrupt("mine")
        return super().__len__() - 2 * (self.method == "negative")

    def __getitem__(self, i):
        if self.method == "getitem":
            raise KeyboardInterrupt("mine")
        return super().__getitem__(i)


@pytest.mark.parametrize("method", ["len", "getitem", "negative"])
def test_an_error_of_a_sequence_is_its_own(kernels, method):
    kind, text = (ValueError, "__len__") if method == "negative" else (KeyboardInterrupt, "mine")
    with raises(kind, text):
        mtf.op(kernels.add_one, outputs=Shaped(Failing(method)))
    with raises(kind, text):
        mtf.op(kernels.add_one, outputs=Failing(method))
    with raises(kind, text):
        mtf.op(kernels.record, outputs=VECTOR)(X, value=Failing(method))


class Interrupted:
    """Whose methods and properties are interrupted."""

    dtype = mx.float32

    def __index__(self):
        raise KeyboardInterrupt("mine")

    @property
    def shape(self):
        raise KeyboardInterrupt("mine")


def test_an_error_of_what_is_read_is_its_own(kernels):
    for outputs in (Interrupted(), [Interrupted()], Shaped((Interrupted(),))):
        with raises(KeyboardInterrupt, "mine"):
            mtf.op(kernels.add_one, outputs=outputs)
    with raises(KeyboardInterrupt, "mine"):
        mtf.op(kernels.record, outputs=VECTOR)(X, value=Interrupted())


def interrupt(*_):
    raise KeyboardInterrupt("mine")


def leave(*_):
    raise SystemExit("mine")


INTERRUPTED = {
    "vjp": (mx.grad, {"vjp": interrupt}, KeyboardInterrupt),
    "jvp": (lambda f: lambda x: mx.jvp(f, [x], [x]), {"jvp": leave}, SystemExit),
    "gradients": (mx.grad, {"vjp": lambda *_: Failing("len")}, KeyboardInterrupt),
    "vmap": (mx.vmap, {"vmap": leave}, SystemExit),
    "axis": (mx.vmap, {"vmap": lambda x, _: (x[0], Interrupted())}, KeyboardInterrupt),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_or_exit_in_a_rule_is_what_it_is(kernels, name):
    transform, rule, kind = INTERRUPTED[name]
    op = mtf.op(kernels.add_one, outputs=lambda x: x, **rule)
    for _ in range(2):
        with raises(kind, "mine"):
            transform(lambda x: op(x).sum())(mx.ones((2, 2)))


def test_an_interrupt_in_outputs_is_what_it_is_when_compiled(kernels):
    op = mtf.op(kernels.add_one, outputs=lambda x: x if x.size == 3 else interrupt())
    compiled = mx.compile(lambda x: op(x), shapeless=True)
    compiled(mx.ones(3))
    with raises(KeyboardInterrupt, "mine"):
        compiled(mx.ones(4))


def test_an_output_larger_than_memory(kernels, add_one):
    shape = (1 << 20, 1 << 20, 1 << 10)
    op = mtf.op(kernels.copy_view, outputs=mtf.ShapeDtype(shape, mx.float32), name="huge")
    good = add_one(X)
    for x in (X, mx.arange(1 << 16).reshape(256, 256).T):
        text = "memory: expected what the machine has, got 4503599627370496"
        with raises(RuntimeError, rf"\[mlx_tvm_ffi\.op huge\] MemoryError: .*{text}"):
            mx.eval(good, op(x))
    assert good.tolist() == [2, 3, 4]
    assert mx.get_active_memory() < 1 << 30


def test_fixed_shapes_under_shapeless_compile(kernels):
    op = mtf.op(kernels.add_one, outputs=VECTOR, name="fixed")
    function = mx.compile(lambda x: op(x) * 2, shapeless=True)
    with raises(ValueError, r"\[mlx_tvm_ffi\.op fixed\] outputs: expected a callable", "shapeless"):
        mx.eval(function(X))
        mx.eval(function(mx.zeros(5)))


# --- Making an op.


@pytest.mark.parametrize("fn", [None, 5, "add_one", object(), X])
def test_fn_is_no_function(fn):
    with raises(TypeError, r"\[mlx_tvm_ffi\.op .*\] fn: expected a tvm_ffi.Function", "got"):
        mtf.op(fn, outputs=VECTOR)


def test_fn_is_callable_but_no_function(add_one, kernels):
    for fn in (dict, add_one, kernels):
        with raises(TypeError, "fn: expected a tvm_ffi.Function or a Python function"):
            mtf.op(fn, outputs=VECTOR)


async def coroutine(x, y):
    pass


def generator(x, y):
    yield


class CallableGenerator:
    def __call__(self, x, y):
        yield


@pytest.mark.parametrize(
    "fn", [coroutine, generator, functools.partial(generator), CallableGenerator()]
)
def test_fn_that_would_not_run(fn):
    with raises(TypeError, "fn: expected a function that runs when it is called"):
        mtf.op(fn, outputs=VECTOR)


BAD_SPECS = {
    "unknown": (["args", "outs"], ValueError, ['got "outs"', "Correct the name"]),
    "empty name": (["args", ""], ValueError, ['got ""']),
    "no number": (["args.", "rets"], ValueError, ['got "args."']),
    "negative number": (["args.-1", "rets"], ValueError, ['got "args.-1"']),
    "not a number": (["args.x", "rets"], ValueError, ['got "args.x"']),
    "zeros in front": (["args.0", "args.00", "rets"], ValueError, ['got "args.00"']),
    "a huge number": (["args.99999999999999999999999", "rets"], ValueError, ["got"]),
    "no attribute's name": (["attrs.", "args", "rets"], ValueError, ['got "attrs."']),
    "attrs alone": (["attrs", "args", "rets"], ValueError, ['got "attrs"']),
    "another ctx": (["ctx.device", "args", "rets"], ValueError, ['got "ctx.device"']),
    "no Unicode": (["args", "attrs.\ud800", "rets"], ValueError, ["that can be printed", "ud800"]),
    "twice": (["args", "rets", "args"], ValueError, ['each name once, got "args" twice']),
    "attribute twice": (["attrs.a", "attrs.a"], ValueError, ['got "attrs.a" twice']),
    "empty": ([], ValueError, ["at least one name, got none"]),
    "a string": ("args", TypeError, ["a sequence of strings", "got 'args'"]),
    "bytes": (b"", TypeError, ["a sequence of strings", "got b''"]),
    "numbers": ([1, 2], TypeError, ["a sequence of strings"]),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_a_bad_arg_spec(kernels, name):
    spec, kind, texts = BAD_SPECS[name]
    with raises(kind, r"\[mlx_tvm_ffi\.op add_one\] arg_spec: expected", *texts):
        mtf.op(kernels.add_one, outputs=VECTOR, arg_spec=spec, name="add_one")


@pytest.mark.parametrize("name", ["", "two words", "tab\tbed", "line\n", "nul\0", "\ud800"])
def test_a_bad_name(kernels, name):
    with raises(ValueError, "name: expected a name"):
        mtf.op(kernels.add_one, outputs=VECTOR, name=name)


def test_bad_options(kernels):
    with raises(TypeError, "name: expected a string, got int"):
        mtf.op(kernels.add_one, outputs=VECTOR, name=5)
    for contiguous in (5, "yes", b"", [1], None):
        with raises(TypeError, "contiguous: expected a bool or one for each input"):
            mtf.op(kernels.add_one, outputs=VECTOR, contiguous=contiguous)
    with raises(ValueError, "contiguous: expected at least one bool, got none"):
        mtf.op(kernels.add_one, outputs=VECTOR, contiguous=[])
    with raises(TypeError, "pure: expected a bool, got int"):
        mtf.op(kernels.add_one, outputs=VECTOR, pure=1)
    with raises(TypeError, "unexpected keyword argument 'outptus'"):
        mtf.op(kernels.add_one, outputs=VECTOR, outptus=VECTOR)
    with raises(TypeError, "outputs"):
        mtf.op(kernels.add_one)


# --- Calling an op.


@pytest.mark.parametrize("value", [1.0, None, [1.0], "x", np.zeros(3), object()])
def test_an_input_that_is_no_array(add_one, value):
    with raises(TypeError, r"\[mlx_tvm_ffi\.op add_one\] input 0: expected an mlx.core.array, got"):
        add_one(value)


def test_an_input_whose_init_has_not_run(add_one):
    class Bare(mx.array):
        def __init__(self) -> None:
            pass

    with raises(TypeError, r"input 0: expected an mlx.core.array, got Bare"):
        add_one(Bare())


def test_an_attribute_among_the_inputs(add_one):
    with raises(TypeError, "input 1: expected an mlx.core.array, got float", "by name"):
        add_one(X, 2.0)


@pytest.mark.parametrize(
    "value",
    [object(), {}, {1, 2}, 1j, lambda: 0, np.zeros(3), range(3), Ellipsis, [1, [object()]]],
    ids=lambda value: type(value).__name__,
)
def test_an_attribute_that_is_not_carried(kernels, value):
    op = mtf.op(kernels.record, outputs=VECTOR, name="record")
    with raises(TypeError, r"\[mlx_tvm_ffi\.op record\] value: expected None, a bool, int", "got"):
        op(X, value=value)


def test_an_array_as_attribute(kernels):
    op = mtf.op(kernels.record, outputs=VECTOR, name="record")
    with raises(TypeError, "value: expected", "got .*array. Pass arrays as positional inputs"):
        op(X, value=X)


def test_an_integer_beyond_64_bits(kernels):
    op = mtf.op(kernels.record, outputs=VECTOR, name="record")
    for value in (1 << 63, -(1 << 63) - 1, 1 << 200):
        with raises(ValueError, rf"value: expected an integer that fits 64 bits, got {value}"):
            op(X, value=value)
    with raises(ValueError, "value: expected an integer that fits 64 bits, got int"):
        op(X, value=10**5000)


def test_a_string_that_is_no_unicode(kernels):
    op = mtf.op(kernels.record, outputs=VECTOR, name="record")
    with raises(UnicodeEncodeError, "surrogates"):
        op(X, value="\ud800")
    with raises(UnicodeEncodeError, "surrogates"):
        op(X, **{"\ud800": 1})


def test_a_sequence_that_contains_itself(kernels):
    op = mtf.op(kernels.record, outputs=VECTOR, name="record")
    value = []
    value.append(value)
    with raises(RecursionError, "in an attribute"):
        op(X, value=value)


def test_missing_and_surplus_attributes(kernels):
    spec = ["args", "rets", "attrs.factor"]
    op = mtf.op(kernels.scale, outputs=lambda x, **_: x, arg_spec=spec, name="scale")
    with raises(ValueError, r"\[mlx_tvm_ffi\.op scale\] attributes: expected factor", "got none"):
        op(X)
    with raises(ValueError, "attributes: expected those that arg_spec names, got factro"):
        op(X, factor=1.0, factro=2.0)
    with raises(ValueError, "attributes: expected factor"):
        op(X, factro=2.0)


def test_more_or_fewer_inputs_than_the_spec(kernels):
    spec = ["args.0", "args.1", "rets"]
    op = mtf.op(kernels.add, outputs=VECTOR, arg_spec=spec, name="add")
    with raises(ValueError, r"\[mlx_tvm_ffi\.op add\] inputs: expected the 2 .* names, got 3"):
        op(X, X, X)
    with raises(ValueError, r"arg_spec: expected numbers below the 1 inputs, got \"args\.1\""):
        op(X)
    op = mtf.op(kernels.add, outputs=VECTOR, arg_spec=["args", "args.0", "rets"], name="add")
    with raises(ValueError, "inputs: expected the 2 that arg_spec names, got 1"):
        op(X)


def test_more_or_fewer_outputs_than_the_spec(kernels):
    spec = ["args", "rets.0"]
    op = mtf.op(kernels.add_one, outputs=[VECTOR, VECTOR], arg_spec=spec, name="two")
    with raises(ValueError, r"\[mlx_tvm_ffi\.op two\] outputs: expected the 1 .* names, got 2"):
        op(X)
    op = mtf.op(kernels.add_one, outputs=VECTOR, arg_spec=["args", "rets.1"], name="one")
    with raises(ValueError, r"arg_spec: expected numbers below the 1 outputs, got \"rets\.1\""):
        op(X)


def test_flags_for_another_number_of_inputs(kernels):
    op = mtf.op(kernels.add, outputs=VECTOR, contiguous=[True, False, True])
    with raises(ValueError, "contiguous: expected one flag for each of 2 inputs, got 3"):
        op(X, X)


@pytest.mark.parametrize("stream", [5, "cpu", X, object(), mx.float32])
def test_a_stream_that_is_none(add_one, stream):
    with raises(TypeError, r"\[mlx_tvm_ffi\.op add_one\] stream: expected an mlx.core.Stream"):
        add_one(X, stream=stream)


def test_an_op_cannot_be_made_otherwise(add_one):
    with pytest.raises(TypeError):
        type(add_one)()


# --- Threads.

WAY_OUT = r"A stream belongs to the thread that made it: evaluate arrays there, with mx\.eval"


def test_an_op_on_a_stream_of_another_thread(add_one):
    def evaluate(y) -> None:
        with raises(
            RuntimeError,
            r"\[mlx_tvm_ffi\.op add_one\] There is no Stream\(cpu, \d+\) in current thread\.",
            WAY_OUT,
        ):
            mx.eval(y)

    y, z = add_one(X), add_one(X.reshape(3, 1).T * 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(evaluate, y).result()
        stream = pool.submit(mx.new_stream, mx.cpu).result()
    assert y.tolist() == [2, 3, 4]
    assert z.tolist() == [[2, 3, 4]]
    evaluate(add_one(X, stream=stream))


def test_a_direct_call_on_an_array_of_another_thread(kernels):
    def call(x) -> None:
        with raises(
            RuntimeError,
            r"\[mlx_tvm_ffi\.direct_call\] argument: There is no Stream\(cpu, \d+\)",
            WAY_OUT,
        ):
            kernels.fresh(x)

    y = mx.exp(X)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call, y).result()
    assert mx.allclose(kernels.fresh(y), mx.exp(X))


def test_a_stream_for_all_threads(add_one):
    y = add_one(X, stream=mx.new_thread_unsafe_stream(mx.cpu))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(y.tolist).result() == [2, 3, 4]


# --- Libraries that go.


def test_a_kernel_whose_library_was_dropped(run_python, library_path):
    # Each step is an error or works.
    run_python(f"""
import gc
import mlx.core as mx, tvm_ffi, mlx_tvm_ffi as mtf
def load():
    return tvm_ffi.load_module({str(library_path("kernels"))!r}, keep_module_alive=False)
x = mx.array([1.0, 2.0, 3.0])
for _ in range(5):
    kernels = load()
    op = mtf.op(kernels.add_one, outputs=x)
    fail = mtf.op(kernels.fail, outputs=lambda x, **_: x)
    fresh = mtf.op(kernels.fresh, outputs=x, arg_spec=["args"])
    y = op(x)
    result = kernels.fresh(x)
    error = None
    try:
        mx.eval(fail(x, kind="ValueError", message="no good"))
    except RuntimeError as e:
        error = e
    del kernels
    gc.collect()
    assert y.tolist() == op(x).tolist() == [2, 3, 4]
    mx.async_eval(op(op(x)))
    try:
        mx.eval(fail(x, kind="ValueError", message="no good"))
    except RuntimeError as e:
        assert "no good" in str(e)
    assert fresh(x).tolist() == [1, 2, 3]
    compiled = mx.compile(lambda x: op(op(x)))
    assert compiled(x).tolist() == [3, 4, 5]
    del op, fail, fresh, compiled, y
    gc.collect()
    mx.synchronize()
    assert "no good" in str(error)
    assert result.tolist() == [1, 2, 3]
    assert mx.array_equal(result, x)
""")
