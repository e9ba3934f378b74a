"""The check of Metal sources against macOS turns red where it should."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from check_symbols import VERSIONS, check

if TYPE_CHECKING:
    from pathlib import Path

CALL = """
#include <mlx/backend/metal/device.h>
void Use(mlx::core::metal::CommandEncoder& encoder) { %s; }
"""


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        pytest.param("encoder.barrier()", None, id="right"),
        pytest.param("encoder.end_encoding(1, 2)", "does not compile", id="wrong call"),
        pytest.param("encoder.get_command_encoder()", "does not compile", id="private call"),
        pytest.param(
            "auto pool = mlx::core::metal::new_scoped_memory_pool()",
            "new_scoped_memory_pool",
            id="hidden symbol",
        ),
    ],
)
def test_planted(call: str, problem: str | None, tmp_path: Path) -> None:
    source = tmp_path / "planted.cc"
    source.write_text(CALL % call)
    problems = check([source], VERSIONS[-1])
    if problem is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert problem in problems[0]
