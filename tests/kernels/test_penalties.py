"""Penalties and bans against their definition in float64, and the kernel against its twin, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ingot.kernels.kernel_checks import KernelArgumentError
from ingot.kernels.sampling.token_penalties import (
    ENDS,
    GENERATED,
    IN_PROMPT,
    BiasTable,
    penalize,
    penalize_reference,
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


def biases(slots: int, vocab: int, width: int, seed: int) -> BiasTable:
    """Up to ``width`` tokens of each slot, and beyond them what must not be used."""
    generator = torch.Generator().manual_seed(seed)
    listed = min(width, vocab)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:listed] for _ in range(slots)])
    padded = torch.zeros(slots, width, dtype=torch.int32)
    padded[:, :listed] = ids.sort(dim=1).values
    values = torch.randn(slots, width, dtype=torch.float64, generator=generator) * 10
    values[:, listed:] = NAN
    return BiasTable(padded, values)


def definition(
    logits: torch.Tensor,
    counts: torch.Tensor,
    slots: list[int],
    values: dict[str, torch.Tensor],
    bias: BiasTable | None = None,
    biased: Sequence[int] = (),
) -> torch.Tensor:
    """The rules in float64, a token at a time."""
    out = logits.double().clone()
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        if bias is not None:
            for token, value in zip(bias.ids[slot, : biased[row]], bias.values[slot], strict=False):
                out[row, token] += value
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
    bias: BiasTable | None = None,
    biased: Sequence[int] = (),
) -> torch.Tensor:
    sent = [
        values[name].to(impl.device) for name in ("repetition", "presence", "frequency", "min_new", "step")
    ]
    places = torch.tensor(slots, dtype=torch.int64, device=impl.device)
    reported: tuple[Any, ...] = (None, None)
    if bias is not None:
        own = BiasTable(*(tensor.to(impl.device) for tensor in bias))
        reported = own, torch.tensor(biased, dtype=torch.int64, device=impl.device)
    found: torch.Tensor = impl(penalize)(
        logits.to(impl.device), counts.to(impl.device), places, *sent, *reported, tiles=tiles
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
    reference = penalize_reference(logits, counts, places, *(values[name] for name in names))
    assert torch.equal(found, reference)


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("slots", "biased", "vocab", "width"),
    [
        ([0], [1], 1, 1),
        ([2, -1, 0, 1], [16, 16, 0, 7], 97, 16),
        ([-1, -1], [3, 3], 40, 4),
        ([3, 0, 1], [64, 1, 0], 600, 64),
    ],
)
@pytest.mark.parametrize("tiles", [{"TILE": 32, "PROGRAMS": 4}, {"TILE": 1024, "PROGRAMS": 1}])
def test_a_bias_comes_before_all_else(
    impl: Implementation,
    dtype: torch.dtype,
    slots: list[int],
    biased: list[int],
    vocab: int,
    width: int,
    tiles: dict[str, int],
) -> None:
    """Beside every other rule as the definition has it; alone with the bits of the float64 sum."""
    logits = (normal(len(slots), vocab + 3, dtype=dtype) * 4)[:, :vocab]
    counts, values = table(4, vocab, torch.int16, vocab), rules(slots, vocab)
    bias = biases(4, vocab, width, seed=vocab)
    found = run(impl, logits, counts, slots, values, tiles, bias, biased)
    wanted = definition(logits, counts, slots, values, bias, biased)
    torch.testing.assert_close(found.double(), wanted, rtol=3e-7, atol=2e-6)
    names = ("repetition", "presence", "frequency", "min_new", "step")
    reference = penalize_reference(
        *(logits, counts, torch.tensor(slots), *(values[name] for name in names)),
        *(bias, torch.tensor(biased)),
    )
    assert torch.equal(found, reference)
    none = torch.zeros_like(counts)
    alone = run(impl, logits, none, slots, values, tiles, bias, biased)
    assert torch.equal(alone, definition(logits, none, slots, values, bias, biased).float())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_full_bias_within_one_tile(impl: Implementation) -> None:
    """As many tokens as a request may bias, all neighbours; a bias beyond float32 is infinite."""
    logits, slots, count = normal(2, 1500, dtype=torch.bfloat16), [1, 0], [1024, 1023]
    ids = torch.arange(1024, dtype=torch.int32).repeat(2, 1)
    bias = BiasTable(ids, torch.full(ids.shape, 1e300, dtype=torch.float64))
    none = torch.zeros(2, 1500, dtype=torch.int16)
    found = run(impl, logits, none, slots, rules(slots, 1), None, bias, count)
    for row in range(2):
        assert torch.equal(found[row, : count[row]], torch.full((count[row],), INF))
        assert torch.equal(found[row, count[row] :], logits[row, count[row] :].float())


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
        ("bias.ids", BiasTable(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4).double())),
        ("bias.values", BiasTable(torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4))),
        ("bias has a wrong width", BiasTable(torch.zeros(3, 6).int(), torch.zeros(3, 6).double())),
        ("biased is missing", BiasTable(torch.zeros(3, 4).int(), torch.zeros(3, 4).double())),
    ):
        if isinstance(bad, BiasTable):
            with pytest.raises(KernelArgumentError, match=name):
                penalize(**good, bias=bad)
            continue
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
    bias, biased = biases(64, vocab, 1024, 3), [(331 * row) % 1025 for row in range(64)]
    found = run(Implementation("cuda"), logits, counts, slots, values, None, bias, biased)
    names = ("repetition", "presence", "frequency", "min_new", "step")
    given = [values[name] for name in names]
    reference = penalize_reference(
        logits.cpu(), counts, torch.tensor(slots), *given, bias, torch.tensor(biased)
    )
    assert torch.equal(found, reference)
