"""Every code block of the README is run, or checked as far as a test can."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = [
    (README[: match.start()].count("\n") + 1, match["language"], match["text"])
    for match in re.finditer(r"^```(?P<language>.*)\n(?P<text>(?s:.*?))^```$", README, re.MULTILINE)
]


def lines_of(language: str) -> list[tuple[int, str]]:
    return [
        (first + number, line)
        for first, found, text in BLOCKS
        if found == language
        for number, line in enumerate(text.splitlines(), start=1)
    ]


def test_no_block_is_of_a_language_that_nothing_here_checks():
    assert {language for _, language, _ in BLOCKS} <= {"python", "sh", "cpp", "cmake"}


@pytest.mark.parametrize(("language", "files"), [("cpp", "*.cc"), ("cmake", "CMakeLists.txt")])
def test_lines_are_those_of_the_examples(language, files):
    examples = {
        line for file in (ROOT / "examples").rglob(files) for line in file.read_text().splitlines()
    }
    assert [line for _, line in lines_of(language) if line not in examples] == []


def test_python_blocks_run_from_top_to_bottom(run_python):
    lines = [""] * README.count("\n")
    for number, line in lines_of("python"):
        lines[number - 1] = line  # so that a traceback names the README's line
    lines.append("assert y.tolist() == [0, 3, 6, 9]; assert gradient.tolist() == [3, 3, 3, 3]")
    run_python("\n".join(lines), limit=300)


@pytest.mark.parametrize(("number", "line"), lines_of("sh"))
def test_shell_line(run_python, number, line):
    command, *arguments = shlex.split(line, comments=True)
    if command == "make":
        subprocess.run(
            ["make", "--dry-run", f"PYTHON={sys.executable}", *arguments],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    elif command == "python":
        run_python(arguments)
    else:
        assert command == "pip", f"README.md:{number}: nothing here checks {command}"
        extras = set(importlib.metadata.metadata("mlx-tvm-ffi").get_all("Provides-Extra") or [])
        assert {
            extra for found in re.findall(r"\[(.*?)\]", line) for extra in found.split(",")
        } <= extras
