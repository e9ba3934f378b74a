"""The shared objects export the API and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_tvm_ffi import _core

ROOT = Path(__file__).parents[1]
PACKAGE = Path(_core.__file__).parent
LIBRARIES = [*(PACKAGE / "lib").glob("lib*.so"), Path(_core.__file__)]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF symbols")


def declared():
    """Give the names that MLX_TVM_FFI_API marks in the sources."""
    folders = [ROOT / "cpp" / "include", ROOT / "cpp" / "src"]
    sources = [source for folder in folders for source in folder.rglob("*.[hc]*")]
    text = "\n".join(source.read_text() for source in sources)
    classes = re.findall(r"class MLX_TVM_FFI_API (\w+)", text)
    functions = re.findall(r"MLX_TVM_FFI_API (?!class)[^;{(]*?(\w+)\(", text)
    return {*classes, *functions}


def leaks(library, api):
    """List what a library exports besides `api` and the entry point of a Python module.

    Weak symbols are left out: inline functions and type information of the headers that it uses.
    """
    command = ["nm", "-DC", "--defined-only", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for line in lines:
        _, kind, name = line.split(maxsplit=2)
        plain = re.sub(r"mlx_tvm_ffi::(v\d+::)?", "", name, count=1)
        is_api = re.match(r"\w*", plain)[0] in {*api, "PyInit__core"}
        if kind not in "VWu" and not is_api:
            found.append(name)
    return sorted(found)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name.split(".")[0])
def test_only_the_api_is_exported(library):
    assert leaks(library, declared()) == []


def test_the_library_with_the_state_exports_nothing():
    assert leaks(PACKAGE / "lib" / "libmlx_tvm_ffi_stream.so", api=set()) == []


def test_leaks_are_seen(tmp_path):
    source = tmp_path / "leak.cc"
    source.write_text(
        "namespace mlx_tvm_ffi { int Internal() { return 1; } int Apply() { return 2; } }\n"
        'extern "C" int helper(int x) { return x; }\nint state = 3;\n'
    )
    library = tmp_path / "libleak.so"
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    assert leaks(library, declared()) == ["helper", "mlx_tvm_ffi::Internal()", "state"]
