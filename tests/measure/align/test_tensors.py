"""``align`` compares tensors, too: what differs is named, and how, though no activation shows it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.weight_meaning import EngineWeights
from ingot.measure.align.align_target import find_target
from ingot.measure.align.checkpoint_tensors import TensorCheck, compare_tensors
from tests.e2e.terminal import ingot
from tests.measure.align.conftest import at
from tests.tiny_models import random_ids, save_model, tiny_config

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.{}."
NORM = LAYER.format(1) + "post_attention_layernorm.weight"
DOWN = LAYER.format(0) + "mlp.down_proj.weight"
Q_NORM = LAYER.format(0) + "self_attn.q_norm.weight"
O_PROJ = LAYER.format(1) + "self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose norms are not all ones."""
    folder = tmp_path_factory.mktemp("align") / "original"
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    save_model(tiny_config("qwen3", **shape), folder, seed=3)

    def shaken(tensors: Tensors) -> None:
        rng = torch.Generator().manual_seed(1)
        for name in tensors:
            if "norm" in name:
                tensors[name] = 1 + 0.3 * torch.randn(tensors[name].shape, generator=rng)

    change(folder, shaken)
    return folder


def change(folder: Path, edit: Callable[[Tensors], None]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    return folder


def layers_exchanged(tensors: Tensors) -> None:
    other = DOWN.replace("layers.0", "layers.1")
    tensors[DOWN], tensors[other] = tensors[other].clone(), tensors[DOWN].clone()


def one_weight(tensors: Tensors) -> None:
    tensors[DOWN][3, 17] = 2.5


def some_rows(tensors: Tensors) -> None:
    tensors[O_PROJ][5:9] = tensors[O_PROJ][9:13].clone()


def some_columns(tensors: Tensors) -> None:
    tensors[O_PROJ][:, 5:7] = tensors[O_PROJ][:, [6, 5]]


def one_row_smaller(tensors: Tensors) -> None:
    tensors[O_PROJ][17] *= 0.44


PLANTED: dict[str, tuple[Callable[[Tensors], None], str, str]] = {
    "norm × 1.01": (at(NORM, lambda w: 1.01 * w), NORM, "the reference's times 1.01"),
    "q_norm of ones": (at(Q_NORM, torch.ones_like), Q_NORM, "all values are 1"),
    "layers exchanged": (layers_exchanged, DOWN, "it is the reference's layers.1.mlp.down_proj.weight"),
    "one weight": (one_weight, DOWN, "1 of 8192 values: [3, 17] is 2.5 instead of"),
    "transposed": (at(O_PROJ, torch.t), O_PROJ, "the reference's, transposed"),
    "negated": (at(O_PROJ, torch.neg), O_PROJ, "the reference's times -1"),
    "rows": (some_rows, O_PROJ, "4 of 64 rows, from 5 to 8"),
    "one row smaller": (one_row_smaller, O_PROJ, "1 of 64 rows, from 17 to 17"),
    "columns": (some_columns, O_PROJ, "2 of 64 columns, from 5 to 6"),
}
OF_LINEAR_LAYERS = [name for name in PLANTED if "norm" not in name]


def changed(original: Path, tmp_path: Path, edit: Callable[[Tensors], None]) -> Path:
    """A copy with other tensors."""
    return change(Path(shutil.copytree(original, tmp_path / "other")), edit)


def built_of(checkpoint: Path, folder: Path, scheme: str, dtype: str = "fp32") -> Path:
    """Its engine, of ``w4a16`` or ``w4a16 gptq``."""
    name, _, method = scheme.partition(" ")
    quant = QuantConfig(name, group=32 if name == "w4a16" else None, method=method or None)
    samples = folder.with_name("ids.jsonl")
    lines = (json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(6))
    samples.write_text("".join(lines))
    calib = samples if quant.calibrated else None
    return build(checkpoint, folder, device="cpu", dtype=dtype, quant=quant, proof=False, calib=calib)


def compared(built: Path, original: Path) -> TensorCheck:
    return compare_tensors(find_target(str(built), torch.device("cpu"), "auto"), original)


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_what_was_changed_is_named(name: str, dtype: str, original: Path, tmp_path: Path) -> None:
    edit, tensor, reported = PLANTED[name]
    other = changed(original, tmp_path, edit)
    engine = build(other, tmp_path / "engine", device="cpu", dtype=dtype, proof=False)
    for built in (engine, other) if dtype == "fp32" else (engine,):
        first, *rest = compared(built, original).differences
        assert first.name == tensor.removeprefix("model.")
        assert first.text.startswith(reported), first.text
        assert len(rest) == (name == "layers exchanged")


@pytest.mark.parametrize(
    ("edit", "keeps"),
    [
        (
            lambda w: w @ torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))[0],
            True,
        ),
        (lambda w: w[:, torch.arange(63, -1, -1)], True),
        (lambda w: torch.randn(w.shape, generator=torch.Generator().manual_seed(1)), False),
        (lambda w: w.roll(1, 0), False),
        (lambda w: torch.cat([-w[:32], w[32:]]), False),
    ],
    ids=[
        "rotated",
        "columns in another order",
        "others",
        "rows in another order",
        "half of the rows negated",
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_rows_that_keep_their_length_are_noted(
    edit: Callable[[torch.Tensor], torch.Tensor], keeps: bool, dtype: str, original: Path, tmp_path: Path
) -> None:
    """A rotation of a product's inputs, whose other half no file has."""
    engine = build(
        changed(original, tmp_path, at(O_PROJ, edit)), tmp_path / "e", device="cpu", dtype=dtype, proof=False
    )
    (difference,) = compared(engine, original).differences
    assert ("every row keeps its length, as where this product's inputs are" in difference.text) == keeps


def test_a_copied_value_may_not_be_one_unit_off(original: Path, tmp_path: Path) -> None:
    """Both are of files in one dtype: nothing explains a last bit."""

    def one_unit(tensors: Tensors) -> None:
        tensors[DOWN][3, 17] = tensors[DOWN][3, 17].nextafter(torch.tensor(9.0))

    (one,) = compared(changed(original, tmp_path, one_unit), original).differences
    assert (one.name, one.text[:24]) == (DOWN.removeprefix("model."), "1 of 8192 values: [3, 17")


@pytest.mark.stays(
    *("w8a16-layers exchanged", "w8a16-rows", "w4a16-one weight", "w8a16 gptq-transposed"),
    *("w4a16 gptq-negated", "w4a16 gptq-columns", "w4a16 gptq-one row smaller"),
)
@pytest.mark.parametrize("name", OF_LINEAR_LAYERS)
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16", "w8a16 gptq", "w4a16 gptq"])
def test_what_was_changed_before_quantization_is_named(
    name: str, scheme: str, original: Path, tmp_path: Path
) -> None:
    edit, tensor, reported = PLANTED[name]
    other = changed(original, tmp_path, edit)
    engine = built_of(other, tmp_path / "engine", scheme)
    first, *rest = compared(engine, original).differences
    assert first.name == tensor.removeprefix("model.")
    assert len(rest) == (name == "layers exchanged")
    if name == "one weight":
        assert first.text.startswith("1 of 64 rows, from 3 to 3")
    elif name == "negated":
        assert first.text.startswith("the reference's times -")
    elif name not in ("columns", "one row smaller"):  # which fewer bits take for a factor
        assert first.text.startswith(reported), first.text


@pytest.mark.grid(1)
@pytest.mark.parametrize("scheme", ["none", "w8a16", "w4a16", "w8a8", "w8a16 gptq", "w4a16 gptq"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_an_engine_of_the_original_has_its_tensors(
    scheme: str, dtype: str, original: Path, tmp_path: Path
) -> None:
    found = compared(built_of(original, tmp_path / "engine", scheme, dtype), original)
    assert found.differences == ()
    assert found.compared == 19
    assert found.left_out is None


def an_input_that_others_explain(tensors: Tensors) -> None:
    """Channels 15 and 3 of the hidden states are the same; behind a norm one is small and the other large."""
    tensors["model.embed_tokens.weight"][:, 15] = tensors["model.embed_tokens.weight"][:, 3]
    rows, norm = (tensors[name.replace("layers.1", "layers.0")] for name in (O_PROJ, NORM))
    rows[15] = rows[3]
    norm[3], norm[15] = 8.0, 0.2


@pytest.mark.parametrize("scheme", ["w8a16 gptq", "w4a16 gptq"])
def test_a_column_makes_up_for_others(scheme: str, original: Path, tmp_path: Path) -> None:
    """Its values move several times as far as others, in 4 bits by more than half of a row's largest."""
    other = changed(original, tmp_path, an_input_that_others_explain)
    engine, name = built_of(other, tmp_path / "engine", scheme), "model.layers.0.mlp.up_proj.weight"
    expected = load_file(other / "model.safetensors")[name]
    got = EngineWeights(engine).read("layers.0.mlp.gate_up_proj.weight")[-len(expected) :]
    moved = (got - expected).abs() / expected.abs().amax(1, keepdim=True)
    assert float(moved[:, 15].median() / moved.median()) > 3
    assert scheme == "w8a16 gptq" or float(moved[:, 15].max()) > 0.55
    assert compared(engine, other).differences == ()


def test_the_same_model_in_a_file_of_another_dtype_is_no_difference(original: Path, tmp_path: Path) -> None:
    def halved(tensors: Tensors) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    half = changed(original, tmp_path, halved)
    engine = build(original, tmp_path / "engine", device="cpu", dtype="fp16", proof=False)
    assert compared(engine, half).differences == ()
    change(half, at(NORM, lambda w: 1.01 * w))
    assert [one.name for one in compared(engine, half).differences] == [NORM.removeprefix("model.")]


def test_the_terminal_names_it_and_exits_with_1(original: Path, tmp_path: Path) -> None:
    other = changed(original, tmp_path, one_weight)
    engine = build(other, tmp_path / "engine", device="cpu", proof=False)
    words = ("--ids", "5 6 7", "--steps", "1", "--device", "cpu", "--original", "ingot")
    shown = ingot("align", engine, "--reference", original, *words)
    assert shown.exit_code == 1
    assert "tensors: 1 of 19 differ from the reference's\n" in shown.stdout
    assert "  layers.0.mlp.down_proj.weight: 1 of 8192 values: [3, 17] is 2.5 instead of" in shown.stdout
    reported = json.loads(ingot("align", engine, "--reference", original, *words, "--json").stdout)
    assert [one["name"] for one in reported["tensors"]["differences"]] == ["layers.0.mlp.down_proj.weight"]
    clean = ingot("align", engine, "--reference", other, *words)
    assert (clean.exit_code, "tensors: equal (19 compared)\n" in clean.stdout) == (0, True), clean.stdout


def test_a_difference_that_no_activation_shows_is_no_alignment(original: Path, tmp_path: Path) -> None:
    other = changed(original, tmp_path, one_row_of_the_embedding)
    words = ("--ids", "5 6 7", "--steps", "1", "--device", "cpu", "--original", "ingot")
    shown = ingot("align", other, "--reference", original, *words)
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[-1] == "diverged at tensor embed_tokens.weight"


def one_row_of_the_embedding(tensors: Tensors) -> None:
    """Of an id that no prompt here has."""
    tensors["model.embed_tokens.weight"][90, 3] += 0.1
