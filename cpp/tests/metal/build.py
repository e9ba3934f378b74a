"""Build the simulated Metal, and an MLX with Metal for this machine, into ``build/metal``.

``build.py install`` also builds the package against that MLX and installs it, editable, into the
environment that runs this; ``build.py run COMMAND...`` runs a command with the simulated Metal in
place.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core
import tvm_ffi
from toolchain import HERE, ROOT, SIM_INCLUDE, host_cxx, mlx_metal

BUILD = ROOT / "build" / "metal"
LIB = BUILD / "lib"  # the simulator, which needs no MLX
MLX_VERSION = version("mlx")
MLX = BUILD / f"mlx-{MLX_VERSION}"  # laid out as MLX's package is where it has Metal
MLX_HERE = Path(mlx.core.__file__).parent
KERNELS = MLX / "kernels"
STANDIN = MLX / "lib" / "libmlx_metal.so"


def ninja(file: Path, rules: dict[str, str], edges: list[tuple[Path, str, list[Path]]]) -> None:
    """Bring files up to date: each edge is an output, its rule and its inputs."""
    text = f"builddir = {file.parent}\n"
    for name, command in rules.items():
        text += f"rule {name}\n  command = {command}\n"
        if "-MD" in command:
            text += "  depfile = $out.d\n  deps = gcc\n"
    for output, rule, inputs in edges:
        text += f"build {output}: {rule} {' '.join(map(str, inputs))}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    subprocess.run(["ninja", "-f", file, "-j2", "--quiet"], check=True)


def compile_all(
    sources: list[Path], folder: Path
) -> tuple[list[Path], list[tuple[Path, str, list[Path]]]]:
    """Return the object files of sources and the edges that make them."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    return objects, [(out, "cxx", [source]) for out, source in zip(objects, sources, strict=True)]


def build_simulator() -> None:
    """Build libmetal_sim, and its functions for Python."""
    ffi = HERE / "sim" / "ffi.cc"
    sources = sorted(set((HERE / "sim").glob("*.cc")) - {ffi})
    objects, edges = compile_all(sources, BUILD / "sim")
    library, ffi_library = LIB / "libmetal_sim.so", LIB / "libmetal_sim_ffi.so"
    tvm = Path(tvm_ffi.__file__).parent
    clang = " ".join(host_cxx())
    warnings = "-Wall -Wextra -Werror"
    origin = "-Wl,-rpath,'$$ORIGIN'"
    rules = {
        "cxx": f"{clang} {warnings} -MD -MF $out.d -I {SIM_INCLUDE} -c $in -o $out",
        "link": "g++ -shared -Wl,-soname,libmetal_sim.so $in -o $out -lpthread -ldl",
        "ffi": f"g++ -std=c++20 -O1 -fPIC -shared {warnings} -isystem {tvm}/include $in -o $out "
        f"-L {tvm}/lib -ltvm_ffi {origin}",
    }
    edges += [(library, "link", objects), (ffi_library, "ffi", [ffi, library])]
    ninja(BUILD / "sim" / "build.ninja", rules, edges)
    objc = LIB / "libobjc.so"  # what a Mac links for the same symbols
    objc.unlink(missing_ok=True)
    objc.symlink_to(library.name)


def build_mlx() -> None:
    """Lay out an MLX with Metal: MLX's Linux library, and the stand-in for its Metal half."""
    wheel = mlx_metal(MLX_VERSION)
    objects, edges = compile_all(sorted((HERE / "mlx").glob("*.cc")), MLX / "obj")
    clang = " ".join(host_cxx())
    here = MLX_HERE / "lib"
    rules = {
        "cxx": f"{clang} -Wall -Wextra -Werror -fvisibility=hidden -fvisibility-inlines-hidden "
        f"-MD -MF $out.d -I {SIM_INCLUDE} -isystem {wheel}/include "
        f"-isystem {wheel}/include/metal_cpp -c $in -o $out",
        "link": f"g++ -shared $in -o $out -L {LIB} -lmetal_sim -L {here} -lmlx -Wl,-z,defs "
        f"-Wl,-rpath,{LIB}:{here} -ldl",
    }
    ninja(MLX / "build.ninja", rules, [*edges, (STANDIN, "link", objects)])
    for name, target in ("include", wheel / "include"), ("lib/libmlx.so", here / "libmlx.so"):
        link = MLX / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    config = MLX / "share" / "cmake" / "MLX"
    config.mkdir(parents=True, exist_ok=True)
    for file in (wheel / "share" / "cmake" / "MLX").iterdir():
        text = file.read_text().replace("@rpath/libmlx.dylib", "libmlx.so")
        text = text.replace("libmlx.dylib", "libmlx.so")
        lines = [line for line in text.splitlines() if "INTERFACE_LINK_LIBRARIES" not in line]
        (config / file.name).write_text("\n".join(lines) + "\n")


def build_kernels() -> None:
    """Build what tests load: each NAME.cc here, as a kernel library is built, is libmetal_NAME."""
    tvm = Path(tvm_ffi.__file__).parent
    clang = " ".join(host_cxx())
    includes = f"-I {ROOT}/cpp/include -I {SIM_INCLUDE} -isystem {tvm}/include "
    rules = {
        "cxx": f"{clang} -Wall -Wextra -Wno-unused-parameter -Werror "
        f"-fvisibility=hidden -MD -MF $out.d {includes}"
        f"-isystem {mlx_metal(MLX_VERSION)}/include/metal_cpp -c $in -o $out",
        "link": f"g++ -shared $in -o $out -L {tvm}/lib -ltvm_ffi",
    }
    objects, edges = compile_all(sorted(HERE.glob("*.cc")), KERNELS)
    for file in objects:
        edges.append((KERNELS / f"libmetal_{file.stem}.so", "link", [file]))
    ninja(KERNELS / "build.ninja", rules, edges)


def install() -> None:
    """Install the package, built against the MLX with Metal."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    settings = [
        "cmake.build-type=None",  # quicker, and with assertions
        f"build-dir={BUILD}/package-{MLX_VERSION}",
        f"cmake.define.MLX_DIR={MLX}/share/cmake/MLX",
    ]
    environment = {
        "CXX": f"{sys.executable} {HERE}/toolchain.py",
        "CXXFLAGS": f"-isystem {SIM_INCLUDE}",
        "LDFLAGS": f"-L{LIB}",
    }
    options = [option for setting in settings for option in ("-C", setting)]
    subprocess.run([*pip, *options, "-e", ROOT], check=True, env={**os.environ, **environment})


def environment() -> dict[str, str]:
    """Return the variables by which MLX finds the simulated Metal."""
    compiler = f"LD_PRELOAD= {sys.executable} {HERE}/msl/msl2so.py"
    return {
        "LD_PRELOAD": str(STANDIN),
        "METAL_KERNELS": str(KERNELS / "libmetal_kernels.so"),
        "METAL_SIM_LIBRARY": str(LIB / "libmetal_sim_ffi.so"),
        "METAL_SIM_MSLC": compiler,
        "METAL_SIM_CACHE": str(BUILD / "msl"),
        "DEVICE": "gpu",
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        os.execvpe(sys.argv[2], sys.argv[2:], {**os.environ, **environment()})
    build_simulator()
    build_mlx()
    build_kernels()
    if sys.argv[1:2] == ["install"]:
        install()
