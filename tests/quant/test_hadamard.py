"""The rotation: orthogonal, spread, the same each time."""

from __future__ import annotations

import hashlib

import pytest
import torch

from ingot.quant.hadamard import odd_part, rotate, rotate_back, signs

SIZES = (1, 2, 3, 7, 8, 12, 32, 48, 64, 96, 130, 256, 640, 896)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_orthogonal(size: int) -> None:
    matrix = rotate(torch.eye(size, dtype=torch.float64))
    one = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, one, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotate_back(one), matrix.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_no_channel_stays_loud(size: int) -> None:
    matrix = rotate(torch.eye(size, dtype=torch.float64)).abs()
    bound = (1 if odd_part(size) == 1 else 2) / size
    assert float(matrix.max()) <= bound**0.5 + 1e-12


def test_against_the_matrix_itself() -> None:
    """Sylvester's matrix by its definition: (-1)^(bits that j and k share)."""
    index = torch.arange(64)
    shared = torch.tensor([[bin(int(j) & int(k)).count("1") % 2 for k in index] for j in index])
    matrix = (1.0 - 2.0 * shared) / 8
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(x), (x * signs(64)) @ matrix, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [64, 96, 4096])
def test_a_common_value_is_spread_too(size: int) -> None:
    """A Hadamard matrix without signs makes one loud channel of a row of ones."""
    turned = rotate(torch.ones(1, size))
    assert float(turned.abs().max()) < 5
    assert float(turned.square().sum()) == pytest.approx(size, rel=1e-4)


def test_any_shape_and_dtype() -> None:
    x = torch.randn(3, 5, 96, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    turned = rotate(x)
    assert (turned.shape, turned.dtype) == (x.shape, torch.float32)
    torch.testing.assert_close(rotate_back(turned), x.float(), rtol=1e-5, atol=1e-5)
    large = torch.randn(600, 4096, generator=torch.Generator().manual_seed(0))  # of several pieces
    assert torch.equal(rotate(large)[577], rotate(large[577:578])[0])
    assert rotate(torch.empty(0, 8)).shape == (0, 8)


def test_the_same_on_any_machine() -> None:
    """Sums and differences alone, in one order: these are the bits."""
    x = (torch.arange(4096, dtype=torch.float32) % 97 - 48) / 64
    digest = hashlib.sha256(rotate(x).numpy().tobytes()).hexdigest()
    assert digest == DIGEST


DIGEST = "16f7a0a96c6e88f7bca2d63fe8813cf0493240e306972c7594234c45ec7f99af"
