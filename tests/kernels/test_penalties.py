"""Penalties and bans against their definition in float64, and the kernel against its twin, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ingot.kernels.checks import KernelArgumentError
from ingot.kernels.sampling.penalties import (
    ENDS,
    GENERATED,
    IN_PROMPT,
    penalize,
    penalize_reference,
    penalize_triton,
)
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, normal

INF, NAN = float("inf"), float("nan")
COUNTS = [torch.int16, torch.int32]


def table(slots: int, vocab: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Slots in which a third of the tokens are in the prompt, the output, both or banned."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.rand(slots, vocab, generator=generator) < 0.3
    count = torch.randint(4, (slots, vocab), generator=generator)
    flags = torch.randint(4, (slots, vocab), generator=generator)
    return torch.where(known, count * GENERATED + flags, 0).to(dtype)


def rules(slots: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Each row's values; those without a slot have some that must not be used."""
    pick = random.Random(seed)
    doubles = {
        "repetition": [pick.choice((1.0, 1.05, 1.3, 0.7)) if s >= 0 else NAN for s in slots],
        "presence": [pick.choice((0.0, 0.3, -2.0)) if s >= 0 else NAN for s in slots],
        "frequency": [pick.choice((0.0, 0.1, 1.7)) if s >= 0 else INF for s in slots],
    }
    longs = {"min_new": [5] * len(slots), "step": [pick.choice((0, 4, 5, 9)) for _ in slots]}
    made = {name: torch.tensor(values, dtype=torch.float64) for name, values in doubles.items()}
    return made | {name: torch.tensor(values, dtype=torch.int64) for name, values in longs.items()}


def definition(
    logits: torch.Tensor, counts: torch.Tensor, slots: list[int], values: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The rules in float64, a token at a time."""
    out = logits.double().clone()
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        own = {name: tensor[row].item() for name, tensor in values.items()}
        for token, state in enumerate(counts[slot].tolist()):
            score, generated = out[row, token].item(), state // GENERATED
            if generated or state & IN_PROMPT:
                score = score * own["repetition"] if score < 0 else score / own["repetition"]
            if generated:
                score -= own["presence"] + own["frequency"] * generated
            out[row, token] = -INF if state & ENDS and own["step"] < own["min_new"] else score
    return out


def run(
    impl: Implementation,
    logits: torch.Tensor,
    counts: torch.Tensor,
    slots: list[int],
    values: dict[str, torch.Tensor],
    tiles: dict[str, int] | None = None,
) -> torch.Tensor:
    sent = [
        values[name].to(impl.device) for name in ("repetition", "presence", "frequency", "min_new", "step")
    ]
    places = torch.tensor(slots, dtype=torch.int64, device=impl.device)
    found: torch.Tensor = impl(penalize, penalize_triton)(
        logits.to(impl.device), counts.to(impl.device), places, *sent, tiles
    )
    assert found.dtype == torch.float32
    return found.cpu()


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count_dtype", COUNTS)
@pytest.mark.parametrize(
    ("slots", "vocab"), [([], 5), ([0], 1), ([2, -1, 0, 1], 97), ([-1, -1], 40), ([3, 0], 600)]
)
@pytest.mark.parametrize("tiles", [{"TILE": 32, "PROGRAMS": 4}, {"TILE": 1024, "PROGRAMS": 1}])
def test_rows_follow_the_definition(
    impl: Implementation,
    dtype: torch.dtype,
    count_dtype: torch.dtype,
    slots: list[int],
    vocab: int,
    tiles: dict[str, int],
) -> None:
    logits = (normal(len(slots), vocab + 3, dtype=dtype) * 4)[:, :vocab]
    counts, values = table(4, vocab, count_dtype, vocab), rules(slots, vocab)
    found = run(impl, logits, counts, slots, values, tiles)
    torch.testing.assert_close(
        found.double(), definition(logits, counts, slots, values), rtol=3e-7, atol=1e-6
    )
    places = torch.tensor(slots, dtype=torch.int64)
    names = ("repetition", "presence", "frequency", "min_new", "step")
    twin = penalize_reference(logits, counts, places, *(values[name] for name in names))
    assert torch.equal(found, twin)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_is_no_finite_number(impl: Implementation) -> None:
    """Infinities keep their sign, NaN stays one unless it is banned, and a row without a slot as it was."""
    logits = torch.tensor([[INF, -INF, NAN, NAN, -0.0, 5.0]] * 2, dtype=torch.float16)
    state = GENERATED + IN_PROMPT
    counts = torch.tensor([[state, state, state, state + ENDS, state, 0]], dtype=torch.int16)
    values = {"repetition": [2.0], "presence": [0.5], "frequency": [0.25]}
    given = {name: torch.tensor(value * 2, dtype=torch.float64) for name, value in values.items()}
    given |= {"min_new": torch.tensor([3, 3]), "step": torch.tensor([2, 2])}
    found = run(impl, logits, counts, [0, -1], given)
    torch.testing.assert_close(
        found[0], torch.tensor([INF, -INF, NAN, -INF, -0.75, 5.0]), rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(found[1], logits[1].float(), rtol=0, atol=0, equal_nan=True)


def test_wrong_arguments_are_named() -> None:
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    number = torch.zeros(1, dtype=torch.float64)
    good: dict[str, Any] = {
        "logits": torch.zeros(1, 4), "counts": torch.zeros(3, 4, dtype=torch.int16), "slots": one,
        "repetition": number, "presence": number, "frequency": number, "min_new": one, "step": one,
    }  # fmt: skip
    penalize(**good)
    for name, bad in (
        ("logits", torch.zeros(1, 4, dtype=torch.int64)),
        ("counts", torch.zeros(3, 5, dtype=torch.int16)),
        ("counts", torch.zeros(3, 4)),
        ("counts", torch.zeros(3, 8, dtype=torch.int16)[:, :4]),
        ("slots", two),
        ("presence", number.float()),
        ("step", number),
    ):
        with pytest.raises(KernelArgumentError, match=name):
            penalize(**{**good, name: bad})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count_dtype", COUNTS)
@pytest.mark.parametrize("vocab", [151_936, 50_257])
def test_real_vocabularies(dtype: torch.dtype, count_dtype: torch.dtype, vocab: int) -> None:
    slots = [-1 if row % 5 == 2 else (7 * row) % 64 for row in range(64)]
    logits = normal(64, vocab, dtype=dtype, device="cuda") * 4
    counts, values = table(64, vocab, count_dtype, 1), rules(slots, 2)
    found = run(Implementation("cuda"), logits, counts, slots, values)
    names = ("repetition", "presence", "frequency", "min_new", "step")
    twin = penalize_reference(logits.cpu(), counts, torch.tensor(slots), *(values[name] for name in names))
    assert torch.equal(found, twin)
