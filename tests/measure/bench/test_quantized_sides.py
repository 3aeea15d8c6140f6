"""Every side of the benchmark of products in fewer bits computes the product that it is timed for."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quantized_sides import COPIES_BYTES, apart, sides

SHAPES = {"qkv": (384, 128), "o": (128, 128), "gate_up": (512, 128), "down": (128, 256)}
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("rows", [1, 16, 64, 264])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_gives_what_it_must(shape: str, rows: int, device: str) -> None:
    torch.manual_seed(rows)
    for name, make in sides(shape, *SHAPES[shape], rows, device):
        if device == "cuda" and "torch." in name:  # the benchmark says what PyTorch's kernels refuse
            continue
        side = make()
        for call in side.calls(most=2):
            assert apart(side, call()) < (5e-3 if "torch._weight" in name else 2e-3), name


def test_another_result_is_seen() -> None:
    side = dict(sides("qkv", *SHAPES["qkv"], 3, "cpu"))["w8a16"]()
    right = side.call(*side.tensors)
    assert apart(side, right.roll(1, dims=1)) > 1
    assert apart(side, torch.zeros_like(right)) == pytest.approx(1)


def test_turns_do_not_fit_into_a_cache() -> None:
    side = dict(sides("qkv", 384, 128, 1, "cpu"))["fp16, F.linear"]()
    assert side.weight_bytes == 384 * 128 * 2
    assert len(side.calls()) == 64
    assert COPIES_BYTES > 4 * 50 << 20
