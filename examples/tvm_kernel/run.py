"""Run the sentence-embedding model with the GELU that TVM compiled: ``python run.py gelu.so``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mlx.core as mx

import mlx_tvm_ffi as mtf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sentence_embeddings import (
    SENTENCES,
    Embedder,
    Weights,
    model_folder,
    plain_ops,
    print_similarities,
    print_times,
)


def main() -> None:
    """Put the kernel in, embed, compare with plain MLX."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", help="what compile.py wrote")
    options = parser.parse_args()
    if not mx.metal.is_available():
        mx.set_default_device(mx.cpu)  # what compile.py makes kernels for
    module = mtf.load_module(options.library)
    gelu = mtf.op(module.gelu, outputs=lambda x: x, name="gelu", offsets=False)
    folder = model_folder()
    weights = Weights(folder)
    ours = Embedder(folder, weights, plain_ops()._replace(gelu=gelu))
    print_similarities(SENTENCES, ours(SENTENCES))
    print_times(SENTENCES, ours, Embedder(folder, weights, plain_ops()))


if __name__ == "__main__":
    main()
