"""Columns of a weight rounded one after another: kernel and twin to the bit, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.weight.gptq_block import MOST_COLUMNS, gptq_block, gptq_block_reference
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation, launched, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# columns, outputs, groups of the grid
SHAPES = [
    (128, 70, 5),
    (96, 33, 1),
    (192, 40, 3),
    (32, 64, 1),
    (1, 5, 1),
    (37, 1, 2),
    (256, 9, 2),
    (100, 130, 7),
]
TILES = [{"BLOCK_N": 16, "num_warps": 1}, {"BLOCK_N": 64, "num_warps": 8}]


def block(
    columns: int, outputs: int, groups: int, device: str, low: int = 0, high: int = 15
) -> dict[str, Any]:
    """Arguments as GPTQ has them: a factor whose rows are tied to each other, scales of both signs, groups in
    no order, weights beyond the grid's ends and some of 0.
    """
    fill = {"dtype": torch.float32, "device": device}
    weight = normal(columns, outputs, seed=1, **fill)
    weight[:, 1::7] = 0.0
    weight[columns // 2] *= 9
    factor = normal(columns, columns + 3, seed=2, **fill)[:, :columns].mul_(0.3).triu_()
    factor.diagonal().abs_().add_(0.5)
    scales = normal(groups, outputs, seed=3, **fill).mul_(0.2)
    scales += scales.sign() * 0.02
    middle = (low + high + 1) // 2
    zeros = (normal(groups, outputs, seed=4, **fill) * 3).round_().add_(middle).clamp_(low, high)
    index = torch.randint(groups, (columns,), generator=torch.Generator().manual_seed(5)).to(device)
    found = {"weight": weight, "factor": factor, "inverse": 1 / factor.diagonal(), "scales": scales}
    return found | {"zeros": zeros, "groups": index, "low": low, "high": high}


def in_float64(given: dict[str, Any], numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What every column stands at, in steps of its grid, and its error, where the numbers are these."""
    wide = {name: value.double() if torch.is_tensor(value) else value for name, value in given.items()}
    weight, errors, steps = wide["weight"].clone(), [], []
    for place, number in enumerate(numbers.double()):
        group = given["groups"][place]
        scale, zero = wide["scales"][group], wide["zeros"][group]
        steps.append(weight[place] / scale + zero)
        errors.append((weight[place] - (number - zero) * scale) / wide["factor"][place, place])
        weight[place + 1 :] -= torch.outer(wide["factor"][place, place + 1 :], errors[-1])
    return torch.stack(steps), torch.stack(errors)


def empty_numbers(given: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(given["weight"].shape, 99, dtype=dtype, device=given["weight"].device)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("low", "high", "dtype"), [(0, 15, torch.uint8), (-127, 127, torch.int8)])
@pytest.mark.parametrize(("columns", "outputs", "groups"), SHAPES)
def test_against_float64(
    columns: int, outputs: int, groups: int, low: int, high: int, dtype: torch.dtype, impl: Implementation
) -> None:
    """Each number is the nearest to where its column stands, whose errors before were made good in it."""
    given = block(columns, outputs, groups, impl.device, low, high)
    given["factor"] = given["factor"] / columns**0.5 + torch.diag(given["factor"].diagonal())
    given["inverse"] = 1 / given["factor"].diagonal()
    numbers = empty_numbers(given, dtype)
    before = given["weight"].clone()
    errors = impl(gptq_block)(**given, numbers=numbers)
    assert torch.equal(given["weight"], before)
    steps, exact = in_float64(given, numbers)
    size = float(steps.abs().max())
    assert float((numbers.double() - steps.clamp(low, high)).abs().max()) <= 0.5 + 1e-5 * size
    torch.testing.assert_close(errors.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.stays("96-33-1", "32-64-1", "1-5-1", "37-1-2", "256-9-2")
@pytest.mark.parametrize(("columns", "outputs", "groups"), SHAPES)
def test_kernel_and_reference_to_the_bit(columns: int, outputs: int, groups: int) -> None:
    given = block(columns, outputs, groups, DEVICE)
    for dtype in (torch.uint8, torch.float32):
        found, wanted = empty_numbers(given, dtype), empty_numbers(given, dtype)
        errors = launched(gptq_block)(**given, numbers=found)
        expected = gptq_block_reference(**given, numbers=wanted)
        assert torch.equal(found, wanted)
        assert torch.equal(errors, expected)
        assert int(found.max()) == 15  # the ends of the grid are met
        assert int(found.min()) == 0


@pytest.mark.parametrize("tiles", TILES)
def test_any_tiles(tiles: dict[str, int]) -> None:
    given = block(50, 70, 3, DEVICE)
    found, wanted = empty_numbers(given, torch.uint8), empty_numbers(given, torch.uint8)
    errors = launched(gptq_block)(**given, numbers=found, tiles=tiles)
    assert torch.equal(errors, gptq_block_reference(**given, numbers=wanted))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_halves_go_to_the_even_step(impl: Implementation) -> None:
    """Also where the number that belongs to it is odd; and nothing is passed on by a factor of 1."""
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 9.0, -9.0]] * 2, device=impl.device)
    one = torch.eye(2, device=impl.device)
    scales, zeros = (torch.full((1, 8), value, device=impl.device) for value in (1.0, 7.0))
    groups = torch.zeros(2, dtype=torch.int64, device=impl.device)
    numbers = torch.empty(2, 8, dtype=torch.uint8, device=impl.device)
    step = impl(gptq_block)
    errors = step(weight, one, one.diagonal().contiguous(), scales, zeros, groups, 0, 15, numbers)
    assert numbers.tolist() == [[7, 9, 9, 7, 5, 5, 15, 0]] * 2
    assert errors.tolist() == [[0.5, -0.5, 0.5, -0.5, 0.5, -0.5, 1.0, -2.0]] * 2


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_numbers_go_where_they_belong_in_a_larger_tensor(impl: Implementation) -> None:
    given = block(20, 30, 2, impl.device)
    whole = torch.full((24, 30), 99, dtype=torch.uint8, device=impl.device)
    impl(gptq_block)(**given, numbers=whole[2:22])
    wanted = empty_numbers(given, torch.uint8)
    gptq_block_reference(**given, numbers=wanted)
    assert torch.equal(whole[2:22], wanted)
    assert bool((whole[[0, 1, 22, 23]] == 99).all())


def test_what_it_takes() -> None:
    given = block(20, 30, 2, "cpu")
    numbers = empty_numbers(given, torch.uint8)

    def refused(text: str, **other: Any) -> None:
        with pytest.raises(IngotError, match=text):
            gptq_block(**({**given, "numbers": numbers} | other))

    refused("weight has the wrong dtype", weight=given["weight"].double())
    refused("factor has the wrong shape", factor=given["factor"][:, :19])
    refused("inverse has the wrong shape", inverse=given["inverse"][:19])
    refused("scales has the wrong shape", scales=given["scales"][:, :29])
    refused("zeros has the wrong shape", zeros=given["zeros"][:1])
    refused("groups has the wrong dtype", groups=given["groups"].int())
    refused("groups has the wrong shape", groups=given["groups"][:19])
    refused("numbers has the wrong dtype", numbers=numbers.half())
    refused("numbers has the wrong shape", numbers=numbers[:19])
    refused("weight is not contiguous", weight=torch.empty(30, 20).T)
    many = block(MOST_COLUMNS + 1, 3, 1, "cpu")
    with pytest.raises(IngotError, match="columns is out of range; seen: 257"):
        gptq_block(**many, numbers=empty_numbers(many, torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "width"), [(4096, 11008), (22016, 4096)])
def test_7b_shapes(outputs: int, width: int) -> None:
    """Every block of a layer with its own grid, by the kernel and by its twin on the GPU."""
    for start in range(0, width, 128):
        given = block(128, outputs, width // 128, "cuda")
        given["weight"] = normal(128, outputs, dtype=torch.float32, device="cuda", seed=start)
        found, wanted = empty_numbers(given, torch.uint8), empty_numbers(given, torch.uint8)
        errors = gptq_block(**given, numbers=found)
        assert torch.equal(errors, gptq_block_reference(**given, numbers=wanted))
        assert torch.equal(found, wanted)
