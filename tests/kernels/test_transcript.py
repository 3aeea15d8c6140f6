"""Rows held to transcripts against the rules' definition, and the kernel against its twin."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.config.transcript_rules import TranscriptRules
from ingot.kernels.kernel_checks import KernelArgumentError
from ingot.kernels.sampling.timestamp_rules import TranscriptRows, TranscriptTables, hold_transcripts
from ingot.runtime.sampling.transcript_masks import Transcripts
from ingot.runtime.scheduling.request import Request
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, normal

INF, VOCAB, FIRST, END = float("inf"), 150, 101, 90
RULES = TranscriptRules(
    END, no_speech=95, first_timestamp=FIRST, suppressed=(3, 64, *range(91, 101)), begin_suppressed=(5, END),
    last_first=20,
)  # fmt: skip
# Place by place: nothing, a first time, text, text; a pair; a pair and text; times that cannot fall.
OUTPUTS = [
    [], [101], [101, 7], [101, 7, 8], [101, 7, 130], [101, 7, 130, 130], [101, 7, 130, 130, 9],
    [149], [149, 7, 149], [120, 8, 149, 149],
]  # fmt: skip


def definition(rules: TranscriptRules, output: list[int], row: torch.Tensor) -> torch.Tensor:
    """OpenAI's rules, a token at a time, on float64 scores."""
    allowed = [True] * len(row)
    first = rules.first_timestamp
    for token in range(len(row)):
        time = token >= first
        after = bool(output) and output[-1] >= first
        pair = after and (len(output) < 2 or output[-2] >= first)
        seen = [one for one in output if one >= first]
        no = token in rules.suppressed or (not output and token in rules.begin_suppressed)
        if not rules.timestamps:
            no |= time
        else:
            no |= pair and time
            no |= after and not pair and token < rules.end
            no |= bool(seen) and time and token < seen[-1] + (0 if after and not pair else 1)
            no |= not output and not time
            no |= not output and rules.last_first is not None and token > first + rules.last_first
        allowed[token] = token in rules.detect if rules.detect else not no
    found = torch.where(torch.tensor(allowed), row.double(), -INF)
    if rules.timestamps and not rules.detect and found[first:].logsumexp(0) > found[:first].max():
        found[:first] = -INF
    return found


def requests_of(rules: TranscriptRules | None, outputs: list[list[int]], name: str = "") -> list[Request]:
    params = SamplingParams(transcript=rules)
    return [Request(f"{name}{i}", [1, 2], params, 99, output_ids=one) for i, one in enumerate(outputs)]


def standing(transcripts: Transcripts, requests: list[Request], device: str) -> TranscriptRows:
    """Where the transcripts of requests stand, each behind a token of someone else."""
    marks = [mark or (-1, -1, 0) for mark in transcripts.marks(requests)]
    rows = [torch.tensor(column, device=device) for column in zip(*marks, strict=True)]
    ids = [token for one in requests for token in (77, (one.prompt_ids + one.output_ids)[-1])]
    places = torch.arange(len(requests), device=device) * 2 + 1
    return TranscriptRows(*rows, torch.tensor(ids, device=device), places)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [32, 64, 256])
def test_rows_follow_the_definition(impl: Implementation, dtype: torch.dtype, tile: int) -> None:
    kinds: list[TranscriptRules | None] = [
        RULES, None, replace(RULES, timestamps=False), replace(RULES, last_first=None, suppressed=()),
        replace(RULES, detect=(40, 41, 99)),
    ]  # fmt: skip
    transcripts = Transcripts(5 * len(OUTPUTS), VOCAB, torch.device(impl.device))
    requests = [one for i, rules in enumerate(kinds) for one in requests_of(rules, OUTPUTS, f"{i}/")]
    logits = (normal(len(requests), 2 * VOCAB, dtype=torch.float32, seed=3) * 4).to(impl.device, dtype)
    logits = logits[:, :VOCAB]  # rows lie apart
    logits[::3, FIRST:] -= 9  # text wins in some rows, timestamps in others
    given = standing(transcripts, requests, impl.device)
    before = transcripts.tables.masks.clone()
    run: Any = impl(hold_transcripts)
    found = run(logits, transcripts.tables, given, {"TILE": tile, "num_warps": 1}).cpu()
    wins = 0
    for request, row, held in zip(requests, logits.cpu(), found, strict=True):
        rules = request.params.transcript
        wanted = row.double() if rules is None else definition(rules, request.output_ids, row)
        assert torch.equal(held.double(), wanted), request.request_id
        wins += rules is RULES and bool((held[:FIRST] > -INF).any())
    assert 0 < wins < len(OUTPUTS)
    assert torch.equal(transcripts.tables.masks, before)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_numbers_that_are_none_stay(impl: Implementation) -> None:
    """NaN where a token may be stays, and is not ruled out by what timestamps weigh."""
    transcripts = Transcripts(4, VOCAB, torch.device(impl.device))
    requests = requests_of(RULES, [[101, 7]] * 4)
    logits = normal(4, VOCAB, dtype=torch.float32).to(impl.device)
    logits[0, 7] = logits[1, 120] = math.nan
    logits[2, 120], logits[3] = INF, -INF
    given = standing(transcripts, requests, impl.device)
    run: Any = impl(hold_transcripts)
    found = run(logits, transcripts.tables, given).cpu()
    assert found[0, 7].isnan()
    assert found[1, 120].isnan()
    assert found[2, 120] == INF
    assert (found[3] == -INF).all()
    assert (found[:3, :FIRST] > -INF).any(1).all()


def test_equal_rules_share_a_place_and_old_ones_make_room() -> None:
    transcripts = Transcripts(2, VOCAB, torch.device("cpu"))
    kinds = [replace(RULES, suppressed=(one,)) for one in range(3)]
    one, two = requests_of(kinds[0], [[], [101]])
    assert [mark and mark.place for mark in transcripts.marks([one, two])] == [0 * 2 + 2, 0 * 2 + 3]
    (other,) = requests_of(kinds[1], [[]], "b")
    assert transcripts.marks([other])[0] == (0, -1, 1)
    transcripts.release(one)
    transcripts.release(two)
    (late,) = requests_of(kinds[2], [[101, 8, 120]], "c")
    assert transcripts.marks([late])[0] == (3, 101, 0)
    assert transcripts.num_held == 2
    assert int(transcripts.tables.masks[3, 0]) & 0b111 == 0b011


def test_a_newest_token_that_is_pending_changes_no_mark() -> None:
    """The host tells the same whether it knows the newest token or not."""
    for output in OUTPUTS[1:]:
        known, pending = requests_of(RULES, [output, output[:-1]])
        pending.num_pending = 1
        marks = Transcripts(2, VOCAB, torch.device("cpu")).marks([known, pending])
        assert marks[0] == marks[1]


def test_wrong_arguments_are_named() -> None:
    row = torch.zeros(2, dtype=torch.int64)
    tables = TranscriptTables(torch.zeros(6, 5, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int64))
    stand = TranscriptRows(row - 1, row, row, torch.zeros(9, dtype=torch.int64), row)
    good: dict[str, Any] = {"logits": torch.zeros(2, 150), "tables": tables, "stand": stand}
    hold_transcripts(**good)
    for name, reported, bad in (
        ("logits", "logits", torch.zeros(2, 150, dtype=torch.int32)),
        ("tables", "masks", tables._replace(masks=tables.masks[:, :4])),
        ("tables", "bounds", tables._replace(bounds=tables.bounds[:2])),
        ("tables", "masks", tables._replace(masks=tables.masks.t().contiguous().t())),
        ("stand", "sets", stand._replace(sets=row[:1])),
        ("stand", "paired", stand._replace(paired=row.int())),
        ("stand", "ids", stand._replace(ids=torch.zeros(9))),
    ):
        with pytest.raises(KernelArgumentError, match=reported):
            hold_transcripts(**{**good, name: bad})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_vocabularies(dtype: torch.dtype) -> None:
    rules = TranscriptRules(
        50257, 50363, 50365, suppressed=tuple(range(50258, 50365)), begin_suppressed=(220,)
    )
    outputs = [[], [50365], [50365, 11], [50365, 11, 50400], [50365, 11, 50400, 50400]]
    transcripts = Transcripts(64, 51866, torch.device("cuda"))
    requests = requests_of(rules, [outputs[i % 5] for i in range(64)])
    logits = normal(64, 51866, dtype=dtype, device="cuda")
    found = hold_transcripts(logits, transcripts.tables, standing(transcripts, requests, "cuda")).cpu()
    for request, row, held in zip(requests, logits.cpu(), found, strict=True):
        assert torch.equal(held.double(), definition_at_once(rules, request.output_ids, row))


def definition_at_once(rules: TranscriptRules, output: list[int], row: torch.Tensor) -> torch.Tensor:
    """``definition`` by the twin, which the tests above hold to it."""
    transcripts = Transcripts(1, len(row), torch.device("cpu"))
    requests = requests_of(rules, [output])
    given = standing(transcripts, requests, "cpu")
    return hold_transcripts(row[None], transcripts.tables, given)[0].double()
