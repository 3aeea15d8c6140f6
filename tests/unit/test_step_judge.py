"""How far a step's values may be from the computed ones, and the words of failures."""

from __future__ import annotations

import pytest
import torch

from ingot.proof.step_judge import Judge
from ingot.proof.step_witness import _cache_steps

UNIT = 2**-8
PLACE = "layers.0.mlp.down_proj"
LABELS = torch.tensor([0] * 10 + [1] * 10)  # ten prompt tokens, ten decoded ones


def normal(seed: int) -> torch.Tensor:
    return torch.randn(len(LABELS), 64, generator=torch.Generator().manual_seed(seed))


def judged(had: torch.Tensor, computed: torch.Tensor) -> list[tuple[str, str]]:
    judge = Judge(UNIT, 2 * UNIT)
    judge.value("stream", PLACE, had, computed, None, LABELS)
    return judge.failures()


def test_noise_passes() -> None:
    computed = normal(1)
    assert judged(computed * (1 + UNIT * normal(2)), computed) == []


def test_one_value_fails_and_its_tokens_are_counted() -> None:
    computed = normal(1)
    had = computed.clone()
    had[13, 5] += 0.5
    ((place, reported),) = judged(had, computed)
    assert place == PLACE
    assert reported.startswith(f"{PLACE} is off by")
    assert reported.endswith("in 1 of 10 decoded tokens")


def test_a_common_factor_fails_by_less() -> None:
    """Each is within its own limit; as a factor of all they are not."""
    computed = normal(1)
    assert judged(computed * (1 + UNIT / 4), computed) == []
    ((_, reported),) = judged(computed * (1 + UNIT), computed)
    assert reported == f"{PLACE} is off by a factor of 1.0039 in prompt tokens"


@pytest.mark.parametrize(("exact", "passes"), [(2.52, True), (2.9, False)])
def test_a_quantized_value_may_differ_only_near_a_tie(exact: float, passes: bool) -> None:
    values = normal(3).round()
    had, values[4, 7] = values.clone(), exact
    had[4, 7] = 2.0
    judge = Judge(UNIT, 2 * UNIT)
    judge.rounded("inner", PLACE, had, torch.ones(1), values, values.round(), LABELS)
    assert (judge.failures() == []) == passes


def test_a_value_off_the_grid_fails() -> None:
    """Nearer than half a step to the exact value, and not where a number is."""
    values = normal(3).round()
    exact = values + 0.2
    had = values.clone()
    had[4, 7] += 0.1
    judge = Judge(UNIT, 2 * UNIT)
    judge.rounded("attn_in", PLACE, had, torch.ones(1), exact, values, LABELS)
    assert [place for place, _ in judge.failures()] == [PLACE]


def test_the_noise_of_a_product_widens_the_limit_of_its_own_value_alone() -> None:
    computed, noise = normal(1), torch.zeros(len(LABELS), 64)
    had = computed.clone()
    had[13, 5] += 0.5
    noise[13, 5] = 0.2
    for where, passes in ((noise, True), (noise.roll(1, 1), False)):
        judge = Judge(UNIT, 2 * UNIT)
        judge.value("stream", PLACE, had, computed, None, LABELS, where)
        assert (judge.failures() == []) == passes
        step, near = torch.full((1,), 0.01), had + 0.3 * (had != computed)
        judge = Judge(UNIT, 2 * UNIT)
        judge.rounded("inner", PLACE, had, step, computed, near, LABELS, where)
        assert (judge.failures() == []) == passes


def test_what_is_infinite_must_be_so_on_both_sides() -> None:
    computed = normal(1)
    computed[2, 3] = torch.inf
    assert judged(computed, computed) == []
    had = computed.clone()
    had[2, 3] = 0
    assert [place for place, _ in judged(had, computed)] == [PLACE]


def test_the_first_place_of_a_kind_is_named_and_the_others_counted() -> None:
    judge, computed = Judge(UNIT, 2 * UNIT), normal(1)
    for kind, place in (("stream", "b"), ("stream", "a"), ("query", "c")):
        judge.value(kind, place, 2 * computed, computed, None, LABELS)
    assert [place for place, _ in judge.failures()] == ["b", "c"]
    assert judge.failures()[0][1].endswith("tokens, and so are 1 places like it")
    assert judge.worst["stream"] > 1


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_steps_of_an_e4m3_cache_are_those_around_the_computed_value(scale: float) -> None:
    """Rounding crosses powers of two, where the distance of e4m3's values doubles: up, and where a value is
    dequantized to 16 bits.
    """
    pairs = [(16.0, 15.6), (-16.0, -15.7), (16.0, 16.4), (15.0, 15.4), (2.0, 1.97), (2**-6, 2**-6 - 2**-11)]
    stored, computed = (torch.tensor(values) for values in zip(*pairs, strict=True))
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # e4m3's, in order
    after = (table[None] <= computed.abs()[:, None]).sum(1)
    around = table[after] - table[after - 1]
    assert around.tolist() == [1.0, 1.0, 2.0, 1.0, 0.125, 2**-9]
    steps = _cache_steps(stored.to(torch.float8_e4m3fn), torch.tensor(scale), computed * scale)
    assert torch.equal(steps, around * scale)
    above = _cache_steps(torch.tensor([15.0]).to(torch.float8_e4m3fn), torch.tensor(scale), computed[:1] + 1)
    assert above.tolist() == [1.0 * scale]  # what was stored is 15: below it the next is 14
