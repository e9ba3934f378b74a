"""Build the package's wheel for arm64 macOS 14 on this machine, and check what is in it.

It proves the build files, not that it runs: nothing here can.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import lief
import tvm_ffi

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from toolchain import ROOT, macos_cxx, macos_package, mlx_metal  # noqa: E402

BUILD = ROOT / "build" / "metal" / "macos"
PLATFORM = "macosx-14.0-arm64"
MINIMUM_MACOS = [14, 0, 0]
PYTHON = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
# Each library of the wheel, what it links besides the system's, and where it finds that.
LIBRARIES = {
    f"_core.{PYTHON}-darwin.so": (
        {"libmlx_tvm_ffi", "libmlx_tvm_ffi_stream", "libmlx", "libtvm_ffi"},
        {"@loader_path/lib", "@loader_path/../mlx/lib", "@loader_path/../tvm_ffi/lib"},
    ),
    "lib/libmlx_tvm_ffi.dylib": (
        {"libmlx_tvm_ffi_stream", "libmlx", "libtvm_ffi"},
        {"@loader_path", "@loader_path/../../mlx/lib", "@loader_path/../../tvm_ffi/lib"},
    ),
    "lib/libmlx_tvm_ffi_stream.dylib": ({"libtvm_ffi"}, {"@loader_path/../../tvm_ffi/lib"}),
    "lib/libmlx_tvm_ffi_tvm_host.dylib": ({"libtvm_ffi"}, {"@loader_path/../../tvm_ffi/lib"}),
}


def build() -> Path:
    """Return the wheel."""
    mlx = mlx_metal(version("mlx"))
    tvm = macos_package("apache-tvm-ffi", version("apache-tvm-ffi")) / "tvm_ffi"
    BUILD.mkdir(parents=True, exist_ok=True)
    objc = ["-shared", "-install_name", "/usr/lib/libobjc.A.dylib", "-o", BUILD / "libobjc.dylib"]
    subprocess.run([*macos_cxx(), HERE / "objc.cc", *objc], check=True)
    # tvm-ffi's own file asks the Python that runs for the library: that is this machine's.
    config = BUILD / "tvm_ffi-config.cmake"
    config.write_text(
        f"include({tvm_ffi.libinfo.find_cmake_path()}/tvm_ffi-config.cmake)\n"
        "set_target_properties(tvm_ffi::shared PROPERTIES\n"
        f"  IMPORTED_LOCATION {tvm}/lib/libtvm_ffi.dylib)\n"
    )
    defines = {
        "CMAKE_SHARED_LINKER_FLAGS": f"-L{BUILD}",
        "CMAKE_TOOLCHAIN_FILE": HERE / "toolchain.cmake",
        "MLX_DIR": mlx / "share" / "cmake" / "MLX",
        "MLX_LIBRARY": mlx / "lib" / "libmlx.dylib",
        "tvm_ffi_DIR": BUILD,
        "Python_SOABI": f"{PYTHON}-darwin",
        "PYTHON_MODULE_EXTENSION": f".{PYTHON}-darwin.so",
    }
    options = ["cmake.build-type=None", f"build-dir={BUILD}/build"]  # quicker
    options += [f"cmake.define.{name}={value}" for name, value in defines.items()]
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    for old in BUILD.glob("*.whl"):
        old.unlink()
    subprocess.run(
        [*pip, *(part for option in options for part in ("-C", option)), "-w", BUILD, ROOT],
        check=True,
        env={**os.environ, "_PYTHON_HOST_PLATFORM": PLATFORM},
    )
    (wheel,) = BUILD.glob("*.whl")
    return wheel


def check_library(name: str, data: bytes) -> list[str]:
    """Return what is wrong with one library of the wheel."""
    binary = lief.MachO.parse(list(data))
    if binary is None:
        return [f"{name} is no Mach-O file"]
    library = binary.at(0)
    problems = []
    if library.header.cpu_type != lief.MachO.Header.CPU_TYPE.ARM64:
        problems.append(f"{name} is for {library.header.cpu_type}")
    minimum = library.build_version.minos
    if list(minimum) != MINIMUM_MACOS:
        problems.append(f"{name} needs macOS {minimum}")
    needs, folders = LIBRARIES[name]
    own_name = {f"@rpath/{Path(name).name}", Path(name).name}
    links = {command.name for command in library.libraries} - own_name
    ours = {link.removeprefix("@rpath/").removesuffix(".dylib") for link in links if "@" in link}
    system = {link for link in links if "@" not in link}
    if not ours <= needs:
        problems.append(f"{name} links {sorted(ours - needs)}")
    if wrong := [link for link in system if not link.startswith("/usr/lib/")]:
        problems.append(f"{name} links {wrong}")
    found = {path.path for path in library.rpaths}
    if found != folders:
        problems.append(f"{name} looks in {sorted(found)}, expected {sorted(folders)}")
    return problems


def check(wheel: Path) -> list[str]:
    """Return what is wrong with the wheel."""
    tag = sysconfig.get_python_version().replace(".", "")
    problems = []
    if not wheel.name.endswith(
        f"-cp{tag}-cp{tag}-{PLATFORM.replace('-', '_').replace('.', '_')}.whl"
    ):
        problems.append(f"the wheel is called {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        prefix = "mlx_tvm_ffi/"
        files = {name.removeprefix(prefix) for name in archive.namelist() if prefix in name}
        binaries = {name for name in files if name.endswith((".so", ".dylib", ".a", ".metallib"))}
        if binaries != set(LIBRARIES):
            problems.append(f"libraries: expected {sorted(LIBRARIES)}, got {sorted(binaries)}")
        for name in sorted(binaries & set(LIBRARIES)):
            problems += check_library(name, archive.read(prefix + name))
        for name in ("__init__.py", "_built.py", "py.typed", "include/mlx_tvm_ffi/stream.h"):
            if name not in files:
                problems.append(f"{name} is missing")
    return problems


if __name__ == "__main__":
    made = build()
    sys.stdout.write(f"{made.name}\n")
    sys.exit("\n".join(check(made)) or None)
