"""Metadata made at build time: exactly the MLX built with, since MLX promises no C++ ABI."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def dynamic_metadata(
    settings: Mapping[str, list[str]], _project: Mapping[str, object]
) -> dict[str, list[str]]:
    """Give the dependencies: MLX at the version of the build environment, and the others."""
    return {"dependencies": [f"mlx=={version('mlx')}", *settings["others"]]}


def dynamic_wheel(_settings: Mapping[str, list[str]]) -> dict[str, bool]:
    """Say that a wheel's dependencies may differ from those of its source archive."""
    return {"dependencies": True}
