"""Compilers from PyPI's ziglang, for this machine and for macOS, and MLX's macOS packages.

As a program it is the compiler for this machine, for CMake.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import ziglang

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ZIG = Path(ziglang.__file__).parent / "zig"
SIM_INCLUDE = HERE / "sim" / "include"
MACOS_TARGET = "aarch64-macos.14.0"


@cache
def host_cxx() -> list[str]:
    """Return the command of a clang with blocks that uses the system's libstdc++.

    zig's own libc++ would not fit the C++ types of MLX's Linux library.
    """
    version = subprocess.check_output(["g++", "-dumpversion"], text=True).strip()
    machine = "x86_64-linux-gnu"
    folders = [
        f"/usr/include/c++/{version}",
        f"/usr/include/{machine}/c++/{version}",
        f"{ZIG.parent}/lib/include",
        f"/usr/include/{machine}",
        "/usr/include",
    ]
    command = [str(ZIG), "clang", "-x", "c++", f"--target={machine}", "-std=c++20", "-O1"]
    command += ["-fblocks", "-fPIC", "-nostdinc++", "-nobuiltininc"]
    return command + [option for folder in folders for option in ("-isystem", folder)]


@cache
def macos_cxx() -> list[str]:
    """Return the command of a compiler for arm64 macOS 14."""
    # Without an optimisation zig turns UBSan on, whose symbols nothing here has.
    return [str(ZIG), "c++", "-target", MACOS_TARGET, "-std=c++20", "-O1", "-fvisibility=hidden"]


def macos_package(name: str, version: str) -> Path:
    """Return the folder of a package for macOS, fetched from PyPI once."""
    folder = ROOT / "build" / "metal" / f"{name}-{version}"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        python = f"--python-version={sys.version_info.major}.{sys.version_info.minor}"
        target = folder.with_name("wheels")
        command = [*pip, "--platform=macosx_14_0_arm64", python, "-d", target, f"{name}=={version}"]
        subprocess.run(command, check=True, env={**os.environ, "LD_PRELOAD": ""})
        (wheel,) = target.glob(f"{name.replace('-', '_')}-{version}-*.whl")
        fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh)
        fresh.rename(folder)
    return folder


def mlx_metal(version: str) -> Path:
    """Return the folder ``mlx`` of MLX for macOS."""
    return macos_package("mlx-metal", version) / "mlx"


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "-c" in arguments:
        os.execv(ZIG, [*host_cxx(), *arguments])
    os.execvp("g++", ["g++", *arguments])
