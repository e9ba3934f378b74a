"""The C++ SDK as its users meet it: CMake projects of their own against the installed package."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pybind11
import pytest
import tvm_ffi

import mlx_tvm_ffi  # noqa: F401  teaches tvm-ffi NotImplementedError

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "sdk_tests" / f"{sys.implementation.cache_tag}-{Path(sys.prefix).name}"
MLX = importlib.metadata.version("mlx")


def run(*command, expected=0):
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == expected, f"{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


@pytest.fixture(scope="session")
def cmake_dir():
    return run(sys.executable, "-m", "mlx_tvm_ffi", "--cmake-dir").strip()


@pytest.fixture(scope="session")
def configure(cmake_dir):
    """Configure a project against the installed package."""

    def configure(source, build, *options, expected=0):
        return run(
            *("cmake", "-S", str(source), "-B", str(build), "-G", "Ninja"),
            *(f"-Dmlx_tvm_ffi_ROOT={cmake_dir}", f"-DPython_EXECUTABLE={sys.executable}"),
            *(f"-Dpybind11_ROOT={pybind11.get_cmake_dir()}", *options),
            expected=expected,
        )

    return configure


@pytest.fixture(scope="session")
def build(configure):
    """Build a project; give its build folder."""

    def build(source):
        folder = BUILD / source.name
        configure(source, folder)
        run("cmake", "--build", str(folder))
        return folder

    return build


@pytest.fixture(scope="session")
def example(build):
    return lambda name: build(ROOT / "examples" / name)


@pytest.fixture(scope="session")
def errors(build):
    """Calls with bad input. Of what fails in eval, MLX makes a RuntimeError with the kind in it."""
    return tvm_ffi.load_module(build(ROOT / "cpp" / "tests" / "sdk") / "libsdk_errors.so")


@pytest.fixture
def find(configure, tmp_path):
    """Configure a project that looks for the package; give what CMake says."""

    def find(arguments, *options, expected=0):
        (tmp_path / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(find LANGUAGES CXX)\n"
            f"find_package(mlx_tvm_ffi {arguments})\n"
            "foreach(target mlx_tvm_ffi::stream mlx_tvm_ffi::mlx_tvm_ffi)\n"
            '  if(TARGET ${target})\n    message("found ${target}")\n  endif()\nendforeach()\n'
        )
        output = configure(tmp_path, tmp_path / "build", *options, expected=expected)
        return " ".join(output.split())

    return find


def fake_mlx(folder, version):
    (folder / "MLXConfig.cmake").write_text("add_library(mlx INTERFACE IMPORTED)\n")
    (folder / "MLXConfigVersion.cmake").write_text(
        f"set(PACKAGE_VERSION {version})\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n"
    )


def test_both_targets_are_found(find):
    output = find("CONFIG REQUIRED")
    assert "found mlx_tvm_ffi::stream" in output
    assert "found mlx_tvm_ffi::mlx_tvm_ffi" in output


def test_kernel_authors_need_no_mlx(find):
    output = find("CONFIG REQUIRED COMPONENTS stream", "-DCMAKE_DISABLE_FIND_PACKAGE_MLX=ON")
    assert "found mlx_tvm_ffi::stream" in output
    assert "found mlx_tvm_ffi::mlx_tvm_ffi" not in output


def test_another_mlx_is_refused_with_both_versions_and_the_way_out(find, tmp_path):
    fake_mlx(tmp_path, "0.31.2")
    output = find("CONFIG REQUIRED", f"-DMLX_DIR={tmp_path}", expected=1)
    assert f"MLX: expected version {MLX}, which mlx_tvm_ffi was built with, got 0.31.2" in output
    assert f"Run: python -m pip install 'mlx=={MLX}'" in output


def test_no_mlx_is_refused_with_the_way_out(find):
    output = find("CONFIG REQUIRED", "-DCMAKE_DISABLE_FIND_PACKAGE_MLX=ON", expected=1)
    assert f"MLX: expected version {MLX}, which mlx_tvm_ffi was built with, got none" in output


def test_a_python_without_tvm_ffi_is_refused_with_the_way_out(find, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    output = find("CONFIG REQUIRED", f"-DPython_EXECUTABLE={python}", expected=1)
    assert "-DPython_EXECUTABLE=<the Python that has mlx_tvm_ffi>" in output


def test_a_later_minor_version_is_refused(find):
    output = find("99 CONFIG REQUIRED", expected=1)
    assert 'compatible with requested version "99"' in output


def test_an_unknown_component_is_refused(find):
    find("CONFIG REQUIRED COMPONENTS nothing", expected=1)


def test_the_kernel_example_runs_and_links_neither_mlx_nor_us(example, run_python):
    library = example("cpp_kernel") / "libscale.so"
    needed = re.findall(r"NEEDED\).*\[(\S+)\]", run("readelf", "-d", str(library)))
    assert "libtvm_ffi.so" in needed
    assert not [name for name in needed if "mlx" in name]
    output = run_python([str(ROOT / "examples" / "cpp_kernel" / "run.py"), str(library)]).stdout
    assert "called directly: array([0, 2, 4, 6, 8], dtype=float32)" in output
    assert "as an op: array([0.367879" in output


def test_the_kernel_example_reports_bad_arguments(example):
    scale = tvm_ffi.load_module(example("cpp_kernel") / "libscale.so").scale
    with pytest.raises(TypeError, match="x: expected float32"):
        scale(mx.zeros(2, mx.float16), mx.zeros(2), 1.0)
    with pytest.raises(ValueError, match="y: expected x's size"):
        scale(mx.zeros(2), mx.zeros(3), 1.0)


def test_the_op_example_runs_without_python(example):
    program = example("cpp_op") / "swish_main"
    assert "libpython" not in run("readelf", "-d", str(program))
    assert run(str(program)).startswith("largest difference: value ")


def test_the_op_example_runs_in_python(example, run_python):
    build = example("cpp_op")
    script = str(ROOT / "examples" / "cpp_op" / "run.py")
    output = run_python([script], env={"PYTHONPATH": str(build)}).stdout
    assert "as expected: [swish] x: expected float32." in output


def test_ops_of_other_modules_follow_the_scope(example, run_python):
    code = """
import mlx.core as mx, mlx_tvm_ffi as mtf, swish
stream = mx.new_stream(mx.cpu)
with mtf.stream(stream):
    y = swish.swish(mx.ones(4))
assert mx.allclose(y, mx.sigmoid(mx.ones(4)))
for wrong in ("x", 1, None):
    try:
        swish.swish(wrong)
        raise AssertionError(wrong)
    except TypeError as error:
        assert "mlx.core.array" in str(error)
"""
    run_python(code, env={"PYTHONPATH": str(example("cpp_op"))})


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("null function", TypeError, "function: expected a tvm_ffi.Function, got null"),
        ("null kernel", ValueError, "primitive: expected one with a kernel and outputs, got null"),
        ("null primitive", ValueError, "expected one with a kernel and outputs, got null"),
        ("null call", ValueError, "expected one with a kernel and outputs, got null"),
        ("null outputs", ValueError, "expected one with a kernel and outputs, got null"),
        ("no outputs", ValueError, "outputs: expected at least one, got none"),
        ("no inputs", RuntimeError, "TypeError: Mismatched number of arguments"),
        ("too many inputs", RuntimeError, "TypeError: Mismatched number of arguments"),
        ("more inputs than the spec", ValueError, "inputs: expected the 1 that arg_spec names"),
        ("moved from", ValueError, "inputs: expected arrays, got number 0 without a value"),
        ("unknown in spec", ValueError, "arg_spec: "),
        ("twice in spec", ValueError, 'arg_spec: expected each name once, got "args" twice'),
        ("number in spec", ValueError, "arg_spec: expected numbers below the 1 inputs"),
        ("missing attribute", ValueError, "attributes: expected beta, which arg_spec names"),
        (
            "surplus attribute",
            ValueError,
            "attributes: expected those that arg_spec names, got beta",
        ),
        ("name with a space", ValueError, 'name: expected a name without spaces, got "a b"'),
        ("negative size", ValueError, "outputs: expected sizes of 0 or more, got -1"),
        ("huge size", ValueError, "outputs: expected fewer than 2\\*\\*63 bytes, got more"),
        ("negative alias", ValueError, "aliases: expected each output at most once"),
        ("alias out of range", ValueError, "aliases: expected outputs below 1 and inputs below 1"),
        (
            "flags for other inputs",
            ValueError,
            "contiguous: expected one flag for each of 1 inputs",
        ),
        ("stream of nobody", RuntimeError, "no Stream"),
        ("device of nobody", RuntimeError, None),
        ("no gradient", NotImplementedError, "vjp"),
        ("kernel raises", RuntimeError, r"\[mlx_tvm_ffi.op fail\] IndexError: from the kernel"),
    ],
)
def test_bad_input_is_an_error_and_the_rest_works_on(errors, case, kind, message):
    with pytest.raises(kind, match=message):
        errors.run(case)
