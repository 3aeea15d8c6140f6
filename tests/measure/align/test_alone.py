"""What a module by itself may be off by, on values made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ingot.kernels.rows.int8_rows import dequantize_rows, quantize_rows
from ingot.measure.align.isolated_judge import Alone, AloneJudge, Draw, least_of
from ingot.measure.align.stage_difference import measure
from ingot.quant.plain_rows import rounded_rows

HEADS, SIZE = 2, 64
CONFIG = SimpleNamespace(num_heads=4, num_kv_heads=HEADS, rope=SimpleNamespace(dim=SIZE))


def judged(seed: int, factor: float = 1.0) -> Alone:
    """Keys of one token, whose row has many values in the middle between two: by the engine's rule times a
    factor, and by the plain one.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 256, generator=generator).half()
    x[0, 7] = 11 / 256 * 127
    weight = torch.randn(HEADS * SIZE, 256, generator=generator).double()
    plain, other = (rounded_rows(x.double(), flips=flips) @ weight.T for flips in (False, True))
    got = dequantize_rows(quantize_rows(x)).double() @ weight.T * factor
    judge = object.__new__(AloneJudge)
    judge.model = SimpleNamespace(config=CONFIG)  # type: ignore[assignment]
    judge.coarse = torch.float16
    draw = Draw(measure(plain, plain.half()).relative, plain, plain.half())
    ties = measure(plain, other).relative
    return judge._judged("layers.0.keys", plain, got.half(), draw, ties, on_grid=False)


def test_a_row_of_many_ties_is_no_fault() -> None:
    """In a head, too, and in the pair of channels that it turns farthest."""
    found = [judged(seed) for seed in range(200)]
    assert max(one.relative for one in found) > 1e-3  # ties went another way
    assert max(one.share for one in found) < 1


def test_a_wrong_factor_is_one() -> None:
    assert all(judged(seed, 1.05).is_wrong for seed in range(20))


def test_the_share_is_of_the_farther_limit() -> None:
    one = judged(0)
    for name in ("relative", "common"):
        limit = {"relative": one.limit, "common": one.common_limit}[name]
        assert not replace(one, **{name: 0.99 * limit}).is_wrong
        assert replace(one, **{name: 1.01 * limit}).is_wrong
        assert replace(one, **{name: float("nan")}).is_wrong


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_wrong(value: float) -> None:
    one = judged(0)
    assert replace(one, relative=value).share == float("inf")


def test_a_run_has_room_for_a_unit_of_its_rounding() -> None:
    """And in fp32 for an rsqrt that is two units from right, of a rounded value."""
    assert [least_of(dtype) for dtype in (torch.float16, torch.bfloat16)] == [2**-10, 2**-7]
    assert least_of(torch.float32) == 3 * 2**-23


def test_the_rounding_of_an_input_is_expected() -> None:
    """What is expected moves as the checking decoder's value does when its input is rounded."""
    original, exact, rounded = (
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([[1.5, 2.5]]),
        torch.tensor([[1.75, 2.25]]),
    )
    judge = object.__new__(AloneJudge)
    judge.dtype = torch.float16
    judge.expected = SimpleNamespace(get=lambda step, place: original)  # type: ignore[assignment]
    judge._plain = SimpleNamespace(  # type: ignore[assignment]
        at=lambda place, step, how: rounded if how.dtype == torch.float16 else exact
    )
    wanted = judge._wanted(0, "layers.0.mlp", on_grid=False)
    assert wanted is not None
    assert wanted.tolist() == [[1.25, 1.75]]
    judge.dtype = torch.float32
    assert torch.equal(judge._wanted(0, "layers.0.mlp", on_grid=False), original.double())  # type: ignore[arg-type]
