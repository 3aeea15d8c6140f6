"""Products of few rows with weights loaded straight into the tensor cores' registers, against float64."""

from __future__ import annotations

import pytest
import torch

from ingot.kernels.product.fragment_numbers import centre, excess, lift
from ingot.kernels.product.small_gate_up import small_gate_up, small_gate_up_triton
from ingot.kernels.product.small_linear import (
    small_linear,
    small_linear_parts,
    small_linear_parts_triton,
    small_linear_triton,
)
from ingot.kernels.product.small_qkv import small_qkv, small_qkv_reference, small_qkv_triton
from ingot.kernels.tiles.product_tiles import matrix_tiles, settled, split_tiles
from ingot.kernels.weight.stored_weight import dequantized
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.test_small_products import EPS, normed64, qkv_arguments
from tests.kernels.test_stored_weight import random_weight

HALVES = (torch.float16, torch.bfloat16)
FORMS = [
    (8, 0, False),
    (8, 0, True),
    (4, 0, True),
    (4, 32, False),
    (4, 64, True),
    (4, 128, True),
    (4, 256, False),
]
CPU = torch.device("cpu")
# BLOCK_N, warps, chunks ahead, parts of the sums
TILES = [(16, 2, 1, 1), (32, 4, 2, 2), (32, 8, 1, 1), (64, 2, 4, 4)]
NAMES = ("BLOCK_N", "num_warps", "FRAGMENTS", "SPLITS")


def chosen(tiles: tuple[int, ...], split: bool = False) -> dict[str, int]:
    """One of TILES, without its parts where an op has none."""
    choice = dict(zip(NAMES, tiles, strict=True))
    return choice if split else {name: choice[name] for name in NAMES[:3]}


def test_few_rows_of_whole_blocks_take_them() -> None:
    """And so the tests below mean what they say."""
    for form in FORMS:
        weight = random_weight(form, 96, 200, torch.float16, "cpu")
        assert matrix_tiles(5, weight, 2, CPU)["FRAGMENTS"] > 0
        assert split_tiles(5, weight, 2, CPU)["FRAGMENTS"] > 0
        assert not matrix_tiles(5, weight, 4, CPU)["FRAGMENTS"]
        assert not matrix_tiles(9, weight, 2, CPU)["FRAGMENTS"]
    for form, outputs, width in (((8, 64, True), 96, 200), ((4, 0, True), 90, 200), ((4, 0, True), 96, 204)):
        assert not matrix_tiles(5, random_weight(form, outputs, width, torch.float16, "cpu"), 2, CPU)[
            "FRAGMENTS"
        ]
    good = matrix_tiles(5, random_weight((4, 0, True), 96, 200, torch.float16, "cpu"), 2, CPU)
    for change in ({"BLOCK_N": 24}, {"PROGRAMS": 2}, {"BLOCK_T": 32}):
        assert not settled({**good, **change})["FRAGMENTS"]
    assert not settled({**good, "BLOCK_N": 48}, pairs=True)["FRAGMENTS"]


def test_the_numbers_of_a_word() -> None:
    """Where bit operations put them: 4 bits beyond 1024 in fp16, half of them sixteenfold, beyond 128 in
    bf16; 8 bits in fp16 around 0.
    """
    import triton.language as tl

    assert [lift(i, 4, tl.float16) for i in range(4)] == [1.0, 16.0, 1.0, 16.0]
    assert [lift(i, 4, tl.bfloat16) for i in range(4)] == [1.0] * 4
    assert (excess(4, tl.float16), excess(8, tl.float16), excess(4, tl.bfloat16)) == (1024.0, 0.0, 128.0)
    assert [centre(bits, dtype) for bits in (8, 4) for dtype in (tl.float16, tl.bfloat16)] == [128, 0, 0, 0]


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(("rows", "width"), [(1, 200), (7, 1016)])
def test_small_linear(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], tiles: tuple[int, ...],
    rows: int, width: int,
) -> None:  # fmt: skip
    outputs = tiles[0] + 16  # two programs, the second of which BLOCK_N of 32 and 64 leave half empty
    x = normal(rows, width, dtype=dtype, device=impl.device)
    weight = random_weight(form, outputs, width, dtype, impl.device)
    bias = normal(outputs, dtype=dtype, device=impl.device, seed=3)
    residual = normal(rows, outputs, dtype=dtype, device=impl.device, seed=4)
    y = impl(small_linear, small_linear_triton)(x, weight, bias, residual, tiles=chosen(tiles))
    product = x.double() @ dequantized(weight, torch.float64).T
    assert_near(y, product + bias.double() + residual.double())
    parts = impl(small_linear_parts, small_linear_parts_triton)(x, weight, chosen(tiles, split=True))
    torch.testing.assert_close(parts.double().sum(0), product, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", [(8, 0, False), (4, 128, True)])
def test_rows_of_one_sign(impl: Implementation, form: tuple[int, int, bool]) -> None:
    """What is too much in the sums is largest there, and so what its subtraction leaves out."""
    x = normal(3, 4096, dtype=torch.float16, device=impl.device).abs() + 1
    weight = random_weight(form, 32, 4096, torch.float16, impl.device)
    parts = impl(small_linear_parts, small_linear_parts_triton)(x, weight, chosen((32, 4, 1, 1)))
    expected = x.double() @ dequantized(weight, torch.float64).T
    assert ((parts.double().sum(0) - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", [TILES[1], TILES[3]])
def test_small_gate_up(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], tiles: tuple[int, ...]
) -> None:
    for rows in (1, 8):
        x = normal(rows, 160, dtype=dtype, device=impl.device)
        weight = random_weight(form, 96, 160, dtype, impl.device)
        g = normal(160, dtype=dtype, device=impl.device, seed=2)
        y = impl(small_gate_up, small_gate_up_triton)(x, weight, g, EPS, tiles=chosen(tiles))
        gate, up = (normed64(x, g) @ dequantized(weight, torch.float64).T).chunk(2, dim=1)
        assert_near(y, gate * torch.sigmoid(gate) * up, loosen=2)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_small_qkv(impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool]) -> None:
    """The same as the twin with the weight made wide before."""
    for case, rows in (("qwen", 1), ("wide", 5)):
        arguments, options = qkv_arguments(case, dtype, impl.device, rows)
        outputs, width = arguments[1].shape
        weight = random_weight(form, outputs, width, dtype, impl.device)
        dense, narrow = [*arguments], [*arguments]
        dense[1], narrow[1] = dequantized(weight, dtype), weight
        caches = [[t.clone() for t in arguments[9:11]] for _ in range(2)]
        narrow[9:11], dense[9:11] = caches
        y = impl(small_qkv, small_qkv_triton)(*narrow, **options, tiles=chosen(TILES[1]))
        expected = small_qkv_reference(*dense, **options)
        assert_near(y, expected.double(), loosen=4)
        for ours, theirs in zip(*caches, strict=True):
            assert_near(ours, theirs.double(), loosen=4)
