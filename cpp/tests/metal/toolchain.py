"""Compilers from PyPI's ziglang: for this machine with blocks, and for macOS."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import ziglang

HERE = Path(__file__).parent
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
