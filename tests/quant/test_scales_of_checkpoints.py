"""Scales that no tool writes, as a damaged or mixed-up checkpoint has them: refused, by tensor and file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import build
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.errors import CheckpointError
from tests.quant.packed_checkpoints import Packing, write_packed
from tests.quant.test_fp8_blocks import write_blocks
from tests.quant.test_fp8_checkpoints import INPUTS, write_fp8
from tests.support.shown_errors import raises_shown

LAYER = "model.layers.0.mlp.gate_proj"
FILE = "model.safetensors"
WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "blocks": (write_blocks, "weight_scale_inv"),
    "rows": (write_fp8, "weight_scale"),
    "rows-kept": (lambda folder: write_fp8(folder, inputs=INPUTS), "weight_scale"),
    "tensor": (lambda folder: write_fp8(folder, "tensor"), "weight_scale"),
    "small-blocks": (lambda folder: write_fp8(folder, "block"), "weight_scale"),
    "gptq": (lambda folder: write_packed(folder, Packing("gptq")), "scales"),
    "awq": (lambda folder: write_packed(folder, Packing("awq", symmetric=False)), "scales"),
    "pack": (lambda folder: write_packed(folder, Packing("pack")), "weight_scale"),
    "int8": (lambda f: write_packed(f, Packing("int", 8, 0, activations="static")), "weight_scale"),
}
FP8 = ("blocks", "rows", "rows-kept", "tensor", "small-blocks")
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, (write, _) in WRITERS.items():
        write(root / name)
    return {name: root / name for name in WRITERS}


def first(value: float) -> Change:
    def change(scales: torch.Tensor) -> torch.Tensor:
        scales = scales.clone()
        scales.view(-1)[0] = value
        return scales

    return change


def read_with(source: Path, folder: Path, name: str, change: Change) -> torch.Tensor:
    """The layer's weight, of the checkpoint with one tensor changed."""
    tensors = load_file(source / FILE)
    tensors[f"{LAYER}.{name}"] = change(tensors[f"{LAYER}.{name}"]).contiguous()
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.read(f"{LAYER}.weight")


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (torch.zeros_like, "scales are 0 beside values"),
        (lambda scales: scales.to(torch.int32), "the scales are in another dtype|do not fit the blocks"),
        (first(torch.inf), "scales? has values that are not finite"),
        (lambda scales: torch.cat([scales, scales]), "scales do not fit"),
        (lambda scales: scales[:0], "scales do not fit"),
    ],
    ids=["zero", "integers", "infinite", "more", "none"],
)
def test_scales_of_no_weight(
    kind: str, change: Change, words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with raises_shown(CheckpointError, f"gate_proj.*({words}).*{FILE}"):
        read_with(folders[kind], tmp_path / "c", WRITERS[kind][1], change)


@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize(
    ("value", "words"), [(-0.01, "scales are negative.*least -0.01"), (0.0, "scales are 0 beside values")]
)
def test_one_scale_of_fp8(
    kind: str, value: float, words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with raises_shown(CheckpointError, f"gate_proj.*{words}"):
        read_with(folders[kind], tmp_path / "c", WRITERS[kind][1], first(value))


@pytest.mark.parametrize("kind", [name for name in WRITERS if name not in FP8])
def test_scales_of_few_bits_are_not_in_few_bits(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with raises_shown(CheckpointError, "gate_proj.*the scales are in another dtype.*seen: "):
        read_with(folders[kind], tmp_path / "c", WRITERS[kind][1], lambda one: one.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("kind", [name for name in WRITERS if name not in FP8])
def test_a_scale_of_few_bits_may_be_negative_or_0(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """AutoRound writes negative ones; the least of fp16 become 0."""
    with open_checkpoint(folders[kind]) as checkpoint:
        plain = checkpoint.read(f"{LAYER}.weight")
    less = read_with(folders[kind], tmp_path / "less", WRITERS[kind][1], torch.neg)
    assert torch.equal(less, -plain)
    none = read_with(folders[kind], tmp_path / "none", WRITERS[kind][1], first(0.0))
    lost = none != plain
    assert lost.any()
    assert not none[lost].any()
    assert not lost[1:].any()


def test_a_scale_of_0_over_values_of_0(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["rows"] / FILE)
    tensors[f"{LAYER}.weight"].view(torch.uint8)[0] = 0x80  # -0
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folders["rows"] / "config.json").read_bytes())
    found = read_with(tmp_path, tmp_path / "c", "weight_scale", first(0.0))
    assert not found[0].any()
    assert found[1:].any()


@pytest.mark.parametrize("kind", ["rows", "rows-kept"])
def test_scales_of_columns_are_none_of_rows(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    columns = load_file(folders[kind] / FILE)[f"{LAYER}.weight"].shape[1]
    with raises_shown(CheckpointError, f"gate_proj.*scales do not fit.*{columns}"):
        read_with(folders[kind], tmp_path / "c", "weight_scale", lambda scales: scales[:columns])


def test_scales_by_groups_are_not_read_across(folders: dict[str, Path], tmp_path: Path) -> None:
    """[groups, N] in the place of [N, groups] has as many values."""
    with raises_shown(CheckpointError, r"scales do not fit.*\[2, 128\].*\[128, groups\]"):
        read_with(folders["pack"], tmp_path / "c", "weight_scale", lambda scales: scales.T)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (torch.zeros_like, r"\[0\.0\]"),
        (torch.neg, r"\[-0\.0"),
        (lambda scale: torch.cat([scale, scale]), r"shape \[2\]"),
        (lambda scale: scale[:0], r"shape \[0\]"),
        (lambda scale: scale.to(torch.int32) + 1, r"\[1\]"),
    ],
)
def test_the_scale_of_an_input(change: Change, seen: str, folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["int8"] / FILE)
    for name in [one for one in tensors if one.endswith("input_scale")]:
        tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folders["int8"] / "config.json").read_bytes())
    with raises_shown(CheckpointError, rf"input_scale is not one number above 0, in {FILE}; seen: {seen}"):
        build(tmp_path, tmp_path / "engine", device="cpu", proof=False)


def test_a_weight_in_int8_without_its_scale(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["int8"] / FILE)
    del tensors[f"{LAYER}.weight_scale"]
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folders["int8"] / "config.json").read_bytes())
    with raises_shown(CheckpointError, rf"quantized layers lack tensors \(1\).*{LAYER}\.weight_scale"):
        open_checkpoint(tmp_path)
