"""Rows in numbers by blocks: kernels give every number of the rule, products what the numbers mean."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.activation.gated_mlp import Gate, silu_mul
from ingot.kernels.activation.silu_mul_blocks import in_blocks, silu_mul_in_blocks
from ingot.kernels.product.int8.int8_linear import int8_linear
from ingot.kernels.rows.block_rows import BlockSteps, quantize_in_blocks
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight
from ingot.kernels.tiles.int8_tiles import small_int8_tiles
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal

SHAPES = [(1, 16, 16), (3, 40, 32), (5, 96, 32), (2, 1000, 128), (1, 4096, 128)]  # rows, width, block


def block_steps(width: int, block: int, bits: int, ordered: bool, device: str, seed: int = 0) -> BlockSteps:
    """Steps that differ from block to block, some of which cut normal values, and zeros to either side."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-width // block)
    span = 2 + 6 * torch.rand(blocks, generator=generator)
    half = 1 << (bits - 1)
    zeros = torch.randint(-half, half, (blocks,), generator=generator).float()
    order = torch.randperm(width, generator=generator).int() if ordered else None
    moved = None if order is None else order.to(device)
    return BlockSteps((span / 2**bits).to(device), zeros.to(device), block, bits, moved)


def assert_rows(actual: Int8Rows, expected: Int8Rows) -> None:
    assert torch.equal(actual.values, expected.values)
    assert torch.equal(actual.scales, expected.scales)
    assert actual.group == expected.group


def test_the_rule_by_hand() -> None:
    """Two blocks of an odd row: order, ties to even, zeros, cuts, and the fill."""
    steps = BlockSteps(
        torch.tensor([0.5, 2.0]), torch.tensor([1.0, -3.0]), 16, 4, torch.arange(17, -1, -1).int()
    )
    x = torch.zeros(1, 18)
    x[0, 17], x[0, 16], x[0, 15] = 0.25, 0.75, -9.0  # 0.5 and 1.5 steps, and far below
    x[0, 1], x[0, 0] = 5.0, 100.0  # 2.5 steps of the second block, and far above
    rows = quantize_in_blocks(x, steps)
    assert rows.values[0, :4].tolist() == [1, 3, -8, 1]
    assert rows.values[0, 16:].tolist() == [-1, 7] + [0] * 14
    assert rows.scales.tolist() == [[0.5, 2.0]]


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "ordered"), [(8, True), (8, False), (4, True)])
def test_in_blocks(
    impl: Implementation, dtype: torch.dtype, shape: tuple[int, int, int], bits: int, ordered: bool
) -> None:
    rows, width, block = shape
    x = normal(rows, width + 3, dtype=dtype, device=impl.device)[:, :width] * 3
    steps = block_steps(width, block, bits, ordered, impl.device)
    found = impl(in_blocks)(x, steps)
    assert_rows(found, quantize_in_blocks(x, steps))
    assert width < 96 or {int(found.values.min()), int(found.values.max())} == {steps.low, steps.high}


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 2752, 64)])
@pytest.mark.parametrize(("bits", "ordered"), [(8, False), (4, False), (8, True)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_silu_mul(
    impl: Implementation,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    bits: int,
    ordered: bool,
    activation: Gate,
) -> None:
    rows, inner, block = shape
    gate_up = 2 * normal(rows, 2 * inner, dtype=dtype, device=impl.device)
    steps = block_steps(inner, block, bits, ordered, impl.device)
    found = impl(silu_mul_in_blocks)(gate_up, steps, activation=activation)
    wide = impl(silu_mul)(gate_up, activation=activation)
    assert_rows(found, quantize_in_blocks(wide, steps))


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize(("width", "block"), [(96, 32), (200, 64)])
def test_products_mean_what_the_numbers_mean(
    impl: Implementation, dtype: torch.dtype, rows: int, width: int, block: int
) -> None:
    """Against float64: (q - zero) · step times the weight in the same order, with zeros in the bias."""
    steps = block_steps(width, block, 8, True, impl.device)
    found = in_blocks(normal(rows, width, dtype=dtype, device=impl.device), steps)
    outputs = 40
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(-127, 128, (outputs, steps.width), generator=generator, dtype=torch.int8)
    numbers[:, width:] = 0
    weight = Int8Weight(
        numbers.to(impl.device), torch.rand(outputs, generator=generator).to(impl.device) / 500
    )
    each = steps.steps.double().repeat_interleave(block), steps.zeros.double().repeat_interleave(block)
    wide = weight.values.double() * weight.scales.double()[:, None]
    shift = -(wide @ (each[0] * each[1]))
    y = impl(int8_linear)(found, weight, dtype, shift.float())
    meant = (found.values.double() - each[1]) * each[0]
    assert_near(y, meant @ wide.T)


class TestRefused:
    STEPS = block_steps(96, 32, 8, True, "cpu")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"bits": 5}, "unsupported bit width"),
            ({"block": 8}, "block"),
            ({"block": 512}, "block"),
            ({"steps": torch.ones(2)}, "steps"),
            ({"zeros": torch.ones(3, dtype=torch.int32)}, "zeros"),
            ({"order": torch.arange(95).int()}, "order"),
            ({"order": torch.arange(96)}, "order"),
        ],
    )
    def test_steps(self, change: dict[str, object], words: str) -> None:
        own = {name: getattr(self.STEPS, name) for name in ("steps", "zeros", "block", "bits", "order")}
        with pytest.raises(IngotError, match=words):
            in_blocks(torch.ones(2, 96), BlockSteps(**{**own, **change}))  # type: ignore[arg-type]

    def test_rows(self) -> None:
        with pytest.raises(IngotError, match="float"):
            in_blocks(torch.ones(2, 96, dtype=torch.int8), self.STEPS)
        with pytest.raises(IngotError, match="halves"):
            silu_mul_in_blocks(torch.ones(2, 191), self.STEPS)


@pytest.mark.grid
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("width", [4096, 11008])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_products_of_a_7b_are_split(rows: int, width: int, block: int) -> None:
    """Output and down product: a step is a block, every part has steps."""
    tiles = small_int8_tiles(rows, 4096, width, torch.device("cpu"), block, split=True)
    assert tiles["BLOCK_K"] == block
    assert 1 < tiles["SPLITS"] <= width // block
