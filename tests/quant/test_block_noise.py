"""A product by blocks is off by less than its noise says, and the noise is no wider than it must be."""

from __future__ import annotations

import pytest
import torch

from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight, int8_product
from ingot.quant.schemes.block_noise import block_noise


def product(
    rows: int, columns: int, block: int, zero: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs as products have them, exact ones, and noise; blocks lie up to ``zero`` steps from zero."""
    generator = torch.Generator().manual_seed(columns + block)
    blocks = -(-columns // block)
    steps = torch.rand(blocks, generator=generator) + 0.01
    zeros = (torch.randn(blocks, generator=generator) * zero).round()
    x = torch.randint(-128, 128, (20, columns), generator=generator, dtype=torch.int8)
    w = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, generator=generator) + 0.1
    each = (part.double().repeat_interleave(block)[:columns] for part in (steps, zeros))
    step, middle = each
    meant, wide = (x.double() - middle) * step, w.double() * scales.double()[:, None]
    shift = -(step * middle * wide).sum(1)
    padding = (0, blocks * block - columns)
    padded = [torch.nn.functional.pad(part, padding) for part in (x, w)]
    own = Int8Rows(padded[0], steps.expand(20, -1), block)
    got = int8_product(own, Int8Weight(padded[1], scales), torch.float32, shift.float())
    return got.double(), meant @ wide.T, block_noise(meant, wide, steps, zeros, block)


@pytest.mark.parametrize("zero", [0, 20, 2000])
@pytest.mark.parametrize(("columns", "block"), [(64, 64), (600, 128), (11008, 128), (500, 16)])
def test_products_are_within_their_noise(columns: int, block: int, zero: float) -> None:
    got, exact, noise = product(300, columns, block, zero)
    shares = (got - exact).abs() / (noise + 1e-9 * exact.std())  # a sum of 0 is exact
    assert float(shares.max()) < 2  # ALLOWED is 4
    assert float(shares.square().mean().sqrt()) > 0.005  # and its sum is one of magnitudes


def test_blocks_far_from_zero_have_more() -> None:
    near, far = (product(300, 600, 128, zero)[2].mean() for zero in (0, 2000))
    assert float(far) > 10 * float(near)


def test_it_is_of_each_output() -> None:
    """A row of the weight that is a thousand times as large, and what zeros take of it."""
    x, weight = torch.ones(2, 8).double(), torch.ones(3, 8).double()
    weight[1] *= 1000
    noise = block_noise(x, weight, torch.tensor([1.0, 1.0]), torch.tensor([0.0, 5.0]), 4)
    # |t| = 4, 24; |Z| = 20; seven roundings
    expected = (4 + 24 + 20) * 7**0.5 * 2**-24
    assert torch.allclose(noise[:, 0], torch.full((2,), expected).double(), rtol=1e-6)
    assert torch.allclose(noise[:, 1], 1000 * noise[:, 0])
