"""The stream interface in C++: what the header, and the library with the state, promise."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_tvm_ffi import _core

CPU = (1, 0)
CUDA = (2, 0)
ABSENT = (2, 7)  # where no backend has set a default
METAL = (8, 0)


@pytest.fixture
def foreign(library):
    """Another framework, in a library of its own."""
    return library("foreign_stream")


@pytest.fixture
def kernel(library):
    """A kernel library that knows stream.h only."""
    return library("stream_kernel")


@pytest.fixture
def stream(foreign):
    """A stream of that framework, for CUDA."""
    alive = foreign.alive()
    stream = foreign.make_stream(*CUDA, 0xE)
    yield stream
    foreign.release_stream(stream)
    assert foreign.alive() == alive


@pytest.fixture(scope="session")
def stream_library():
    """The library that holds scopes and defaults."""
    (path,) = (Path(_core.__file__).parent / "lib").glob("libmlx_tvm_ffi_stream.*")
    return path


def on_other_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_two_libraries_share_one_state(foreign, kernel, stream):
    scope = foreign.enter(stream)
    assert kernel.current(*CUDA) == stream.value
    foreign.leave(scope)
    assert kernel.innermost() == 0


def test_what_a_kernel_calls_reaches_the_framework(foreign, kernel, stream):
    foreign.set_queue(stream, 0x9)
    scope = foreign.enter(stream)
    assert tuple(kernel.dispatch(*CUDA)) == (0xE, 0xD, 0x9)
    foreign.leave(scope)
    # The first pair is the scope's, which hands the encoder to tvm-ffi's environment.
    assert foreign.calls(stream) == "acquire release enter acquire barrier release leave"


@pytest.mark.parametrize(
    ("thrown", "kind", "message"),
    [
        ("IndexError", IndexError, "an index"),
        ("invalid_argument", ValueError, "a bad argument"),
        ("runtime_error", RuntimeError, "a bad state"),
        ("logic_error", Exception, "a bug"),
        ("int", RuntimeError, "no std::exception"),
    ],
)
def test_exceptions_of_a_framework_reach_the_kernel_with_their_kind(
    foreign, kernel, stream, thrown, kind, message
):
    foreign.raise_in(stream, "barrier", thrown)
    scope = foreign.enter(stream)
    with pytest.raises(kind, match=message):
        kernel.dispatch(*CUDA)
    foreign.leave(scope)
    # The encoder was given back on the way out.
    assert foreign.calls(stream).endswith("acquire barrier release leave")


def test_a_scope_that_the_framework_refuses_is_closed(foreign, kernel, stream):
    foreign.raise_in(stream, "enter", "runtime_error")
    with pytest.raises(RuntimeError, match="a bad state"):
        foreign.enter(stream)
    assert kernel.innermost() == 0
    assert kernel.environment(*CUDA) == 0


def test_an_error_on_leaving_is_logged_and_the_scope_left(foreign, kernel, stream, capfd):
    foreign.raise_in(stream, "leave", "runtime_error")
    foreign.leave(foreign.enter(stream))
    assert "RuntimeError: a bad state" in capfd.readouterr().err
    assert kernel.innermost() == 0


def test_leaving_on_another_thread_is_logged_and_changes_nothing(foreign, kernel, stream, capfd):
    outer, lost = foreign.enter(stream), foreign.enter(stream)

    def leave_from_inside_other_scopes():
        mine = [foreign.enter(stream), foreign.enter(stream)]
        foreign.leave(lost)
        assert kernel.current(*CUDA) == stream.value
        for scope in reversed(mine):
            foreign.leave(scope)

    on_other_thread(leave_from_inside_other_scopes)
    errors = capfd.readouterr().err
    assert errors.count("expected") == 1
    assert "thread: expected the one that entered the scope" in errors
    assert kernel.current(*CUDA) == stream.value
    foreign.leave(outer)
    assert "with others inside it, which were left too" in capfd.readouterr().err
    assert kernel.innermost() == 0


def test_leaving_out_of_order_is_logged_and_leaves_what_is_inside(foreign, kernel, stream, capfd):
    outer, inner = foreign.enter(stream), foreign.enter(stream)
    foreign.leave(outer)
    assert kernel.innermost() == 0
    assert "with others inside it, which were left too" in capfd.readouterr().err
    foreign.leave(inner)
    assert "that an outer one left" in capfd.readouterr().err


def test_a_thread_that_ends_inside_a_scope_keeps_its_stream(foreign, kernel):
    alive = foreign.alive()
    stream = foreign.make_stream(*CUDA, 0xE)
    on_other_thread(lambda: foreign.enter(stream))
    foreign.release_stream(stream)
    assert on_other_thread(kernel.innermost) == 0
    # Its framework may be gone by then, so nothing is released when a thread ends.
    assert foreign.alive() == alive + 1


def test_an_offered_default_never_replaces_one(foreign, kernel):
    first, other = foreign.make_stream(*ABSENT, 0xE), foreign.make_stream(*ABSENT, 0xF)
    assert foreign.offer_default(*ABSENT, first)
    assert not foreign.offer_default(*ABSENT, other)
    assert kernel.current(*ABSENT) == first.value
    foreign.release_stream(foreign.exchange_default(*ABSENT, None))
    foreign.release_stream(first)
    foreign.release_stream(other)


def test_a_default_outlives_its_maker(foreign, kernel):
    alive = foreign.alive()
    stream = foreign.make_stream(*ABSENT, 0xE)
    foreign.exchange_default(*ABSENT, stream)
    foreign.release_stream(stream)
    assert kernel.dispatch(*ABSENT)[0] == 0xE
    foreign.release_stream(foreign.exchange_default(*ABSENT, None))
    assert foreign.alive() == alive


def test_no_encoder_on_a_gpu_is_an_error_and_not_a_silent_zero(foreign, kernel):
    stream = foreign.make_stream(*METAL, 0)
    scope = foreign.enter(stream)
    with pytest.raises(Exception, match="encoder: expected one, got null"):
        kernel.dispatch(*METAL)
    foreign.leave(scope)
    foreign.release_stream(stream)


def test_what_a_framework_does_not_have_is_a_not_implemented_error(foreign, kernel, stream):
    scope = foreign.enter(stream)
    with pytest.raises(NotImplementedError, match="expected one with command buffers"):
        kernel.command_buffer(*CUDA)
    with pytest.raises(NotImplementedError, match="expected one that keeps objects"):
        kernel.keep(*CUDA)
    foreign.leave(scope)


def test_a_dispatch_queue_where_there_are_none_is_an_error(foreign, kernel, stream):
    scope = foreign.enter(stream)
    assert kernel.encode_on_queue(*CUDA)
    foreign.set_queue(stream, 0x9)
    with pytest.raises(NotImplementedError, match="expected no dispatch queue on this system"):
        kernel.encode_on_queue(*CUDA)
    foreign.leave(scope)


def test_null_and_negative_are_value_errors(foreign, kernel, stream):
    with pytest.raises(ValueError, match="stream: expected one, got null"):
        foreign.enter(None)
    with pytest.raises(ValueError, match="device: expected an id of 0 or more, got cuda:-1"):
        kernel.current(2, -1)
    with pytest.raises(ValueError, match="stream: expected one of metal:0, got one of cuda:0"):
        foreign.exchange_default(*METAL, stream)


PRELUDE = """
import ctypes, tvm_ffi
foreign = tvm_ffi.load_module({foreign!r})
kernel = tvm_ffi.load_module({kernel!r})
"""


@pytest.fixture
def run_cpp(run_python, library_path):
    """Run code where both libraries are loaded and we are not."""
    prelude = PRELUDE.format(
        foreign=str(library_path("foreign_stream")), kernel=str(library_path("stream_kernel"))
    )
    return lambda code: run_python(prelude + code)


def test_without_the_library_the_error_says_what_to_do(run_cpp, stream_library):
    # The miss is not remembered: the library may still come.
    run_cpp(f"""
try:
    kernel.innermost()
    raise AssertionError
except RuntimeError as error:
    assert "expected libmlx_tvm_ffi_stream in this process, got none. Import" in str(error)
ctypes.CDLL({str(stream_library)!r})
assert kernel.innermost() == 0
""")


def test_a_framework_needs_no_mlx(run_cpp, stream_library):
    run_cpp(f"""
import sys
ctypes.CDLL({str(stream_library)!r})
stream = foreign.make_stream(1, 0, 0)
foreign.exchange_default(1, 0, stream)
assert kernel.current(1, 0) == stream.value
assert "mlx" not in sys.modules and "libmlx." not in open("/proc/self/maps").read()
""")


def test_importing_us_never_replaces_another_default(run_cpp, stream_library):
    run_cpp(f"""
ctypes.CDLL({str(stream_library)!r})
stream = foreign.make_stream(1, 0, 0)
foreign.exchange_default(1, 0, stream)
import mlx.core as mx, mlx_tvm_ffi as mtf
assert mtf.current_stream(mx.cpu).handle == stream.value == kernel.current(1, 0)
with mtf.stream(mx.default_stream(mx.cpu)) as scoped:
    assert mtf.current_stream(mx.cpu) == scoped
    assert kernel.current(1, 0) == scoped.handle != stream.value
assert kernel.current(1, 0) == stream.value
""")


def test_the_library_twice_in_a_process_has_one_state(run_cpp, stream_library, tmp_path):
    second = shutil.copy(stream_library, tmp_path / "second.so")
    run_cpp(f"""
ctypes.CDLL({str(stream_library)!r})
scope = foreign.enter(foreign.make_stream(2, 0, 14))
ctypes.CDLL({str(second)!r})
third = tvm_ffi.load_module({str(shutil.copy(stream_library, tmp_path / "third.so"))!r})
assert kernel.innermost() != 0
foreign.leave(scope)
assert kernel.innermost() == 0
""")


def test_a_process_may_exit_inside_a_scope(run_cpp, stream_library):
    run_cpp(f"""
ctypes.CDLL({str(stream_library)!r})
foreign.exchange_default(2, 0, foreign.make_stream(2, 0, 14))
foreign.enter(foreign.make_stream(2, 0, 15))
""")


VERSIONS = """
import ctypes, itertools, tvm_ffi
ctypes.CDLL({library!r})
versions = {versions!r}
for (made_for, foreign), (built_for, kernel) in itertools.product(versions.items(), repeat=2):
    foreign, kernel = tvm_ffi.load_module(foreign[0]), tvm_ffi.load_module(kernel[1])
    stream = foreign.make_stream(2, 0, 14)
    scope = foreign.enter(stream)
    assert kernel.current(2, 0) == kernel.innermost() == stream.value
    assert tuple(kernel.dispatch(2, 0)) == (14, 13, 0), (made_for, built_for)
    if built_for == "next":
        try:
            kernel.added(2, 0)
            assert made_for == "next"
        except RuntimeError as error:
            assert made_for != "next" and "got version 1 without it" in str(error), error
    foreign.leave(scope)
    assert foreign.calls(stream) == "acquire release enter acquire barrier release leave"
    foreign.exchange_default(2, 0, stream)
    assert kernel.current(2, 0) == stream.value
    foreign.release_stream(foreign.exchange_default(2, 0, None))
    foreign.release_stream(stream)
    assert foreign.alive() == 0
"""


@pytest.mark.parametrize("library_version", ["now", "next"])
def test_old_and_new_work_together(run_python, library_path, stream_library, library_version):
    library = stream_library if library_version == "now" else library_path("stream_library_next")
    versions = {
        version: [str(library_path(name + suffix)) for name in ("foreign_stream", "stream_kernel")]
        for version, suffix in {"v1": "_v1", "now": "", "next": "_next"}.items()
    }
    run_python(VERSIONS.format(library=str(library), versions=versions))


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("table", ["mtf_stream_table", "mtf_stream_api"])
def test_a_table_only_grows_and_with_a_new_version(table):
    def members(folder):
        text = (folder / "mlx_tvm_ffi" / "stream.h").read_text()
        (version,) = re.findall(r"#define MLX_TVM_FFI_STREAM_VERSION (\d+)", text)
        (body,) = re.findall(rf"typedef struct {table} \{{(.*?)\n\}} {table};", text, re.DOTALL)
        lines = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).split(";")
        return int(version), [" ".join(line.split()) for line in lines if line.strip()]

    version, now = members(ROOT / "cpp" / "include")
    frozen_version, frozen = members(ROOT / "cpp" / "tests" / "abi" / "v1")
    assert now[: len(frozen)] == frozen
    assert (version > frozen_version) == (len(now) > len(frozen))
