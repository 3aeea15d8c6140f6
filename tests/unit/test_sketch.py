"""Eight projections estimate the distance of two activations."""

from __future__ import annotations

import math

import pytest
import torch

from ingot.engine.sketch import OVERFLOW, Sketch, deviation, distance, signs

FIRST = [1, 1, 1, -1, -1, -1, -1, 1, -1, 1, -1, -1, -1, -1, 1, -1]


def rows(seed: int, count: int = 40, size: int = 64) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def sketch(values: torch.Tensor, name: str = "layers.0") -> Sketch:
    return Sketch(name).add(values, first=0)


def test_signs_are_the_same_everywhere() -> None:
    """The bits of SHAKE-256: other versions of PyTorch or NumPy cannot change them."""
    assert signs("layers.0/channels", 16)[0].tolist() == FIRST
    assert torch.equal(signs("x", 100)[:, :30], signs("x", 30))
    assert not torch.equal(signs("x", 30)[0], signs("x", 30)[1])
    assert abs(float(signs("x", 4096).mean())) < 0.05


@pytest.mark.parametrize("error", [1e-6, 1e-3, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_a_deviation_is_about_the_distance(error: float, seed: int) -> None:
    exact = rows(seed)
    near = exact + error * rows(seed + 100)
    reported = deviation(sketch(near).checksum(), sketch(exact).checksum())
    assert 0.4 * distance(near, exact) < reported < 2 * distance(near, exact)
    assert distance(near, exact) == pytest.approx(error, rel=0.1)


@pytest.mark.parametrize("place", [(0, 0), (17, 5), (39, 63)])
def test_any_value_moves_it(place: tuple[int, int]) -> None:
    changed = rows(1)
    changed[place] += 0.01
    assert deviation(sketch(changed).checksum(), sketch(rows(1)).checksum()) > 1e-5


def test_a_sketch_of_parts_equals_the_sketch_of_all_tokens() -> None:
    whole = rows(2)
    parts = Sketch("layers.0").add(whole[:33], first=0).add(whole[33:], first=33)
    assert deviation(parts.checksum(), sketch(whole).checksum()) < 1e-8


def test_order_and_name_count() -> None:
    exact = sketch(rows(3)).checksum()
    assert deviation(sketch(rows(3).flip(0)).checksum(), exact) > 0.1
    assert deviation(sketch(rows(3), "layers.1").checksum(), exact) > 0.1


def test_a_token_of_large_norm_does_not_hide_another() -> None:
    exact = rows(4)
    exact[0] *= 1e4
    near = exact.clone()
    near[7] = -near[7]
    assert deviation(sketch(near).checksum(), sketch(exact).checksum()) > 0.1


def test_nan_is_far() -> None:
    exact, broken = rows(5), rows(5)
    broken[3, 3] = math.nan
    assert deviation(sketch(broken).checksum(), sketch(exact).checksum()) == OVERFLOW
    assert distance(broken, exact) == OVERFLOW
    assert deviation(sketch(exact[:9]).checksum(), sketch(exact).checksum()) == OVERFLOW
    zeros = torch.zeros(4, 8)
    assert deviation(sketch(zeros).checksum(), sketch(zeros).checksum()) == 0


def test_a_common_factor_shows_in_the_norm() -> None:
    """Projections are of tokens of size 1, and the mean is 0."""
    exact = rows(6)
    exact -= exact.mean()
    reported = deviation(sketch(exact * 1.01).checksum(), sketch(exact).checksum())
    assert reported == pytest.approx(0.01, rel=0.01)
