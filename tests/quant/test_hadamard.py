"""The rotation: orthogonal, spread, the same each time."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.quant.methods.hadamard import odd_part, rotate, signs

SIZES = (1, 2, 3, 7, 8, 12, 32, 48, 64, 96, 130, 256, 640, 896)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_orthogonal(size: int) -> None:
    matrix = rotate(torch.eye(size, dtype=torch.float64))
    one = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, one, rtol=0, atol=1e-12)


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
    back = turned.double() @ rotate(torch.eye(96, dtype=torch.float64)).T
    torch.testing.assert_close(back, x.double(), rtol=1e-5, atol=1e-5)
    large = torch.randn(600, 4096, generator=torch.Generator().manual_seed(0))  # of several pieces
    assert torch.equal(rotate(large)[577], rotate(large[577:578])[0])
    assert rotate(torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("size", [1, 8, 96, 130])
def test_any_dimension_and_factors(size: int) -> None:
    x = torch.randn(3, size, 50, generator=torch.Generator().manual_seed(0)).half()
    last = x.transpose(1, 2).contiguous()
    assert torch.equal(rotate(x, dim=1), rotate(last).transpose(1, 2))
    assert torch.equal(rotate(x[0], dim=0), rotate(last[0]).T)
    factors = torch.randn(size, generator=torch.Generator().manual_seed(1)).half()
    assert torch.equal(rotate(last, factors=factors), rotate(last.float() * factors.float()))


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dim", [0, 1])
def test_beside_the_cpu_pieces_are_large(dim: int) -> None:
    """Where the weight is, and in so few operations that their launches do not count: 16 million values."""
    weight = torch.empty(4096, 4096, dtype=torch.float16, device="meta")
    with _Operations() as seen:
        turned = rotate(weight, dim)
    assert (turned.device.type, turned.shape, turned.dtype) == ("meta", weight.shape, torch.float32)
    assert seen.count < 200


def test_the_same_on_any_machine() -> None:
    """Sums and differences alone, in one order: these are the bits."""
    x = (torch.arange(4096, dtype=torch.float32) % 97 - 48) / 64
    digest = hashlib.sha256(rotate(x).numpy().tobytes()).hexdigest()
    assert digest == DIGEST


@pytest.mark.gpu
@pytest.mark.parametrize("size", [130, 896, 4096])
def test_a_gpu_gives_the_same_bits(size: int) -> None:
    x = torch.randn(9000, size, generator=torch.Generator().manual_seed(0))  # 4096: two pieces there
    factors = torch.randn(size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rotate(x.cuda(), factors=factors.cuda()).cpu(), rotate(x, factors=factors))
    assert torch.equal(rotate(x.T.cuda(), dim=0).cpu(), rotate(x.T, dim=0))


DIGEST = "16f7a0a96c6e88f7bca2d63fe8813cf0493240e306972c7594234c45ec7f99af"
