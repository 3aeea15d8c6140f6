"""A graph's kind of sampling covers what the rows of a step need, and no more."""

from __future__ import annotations

import itertools

import pytest

from ingot.config.step_sizes import DRAW_KINDS, SPEECH_KINDS
from ingot.runtime.sampling.sampler import RowSampling, SamplingTensors
from ingot.runtime.step.graphs import KINDS, sampling_kind

ROWS = {
    "greedy": RowSampling(),
    "greedy, whose filters say nothing": RowSampling(top_k=5, top_p=0.5),
    "drawn": RowSampling(temperature=0.7),
    "min-p": RowSampling(temperature=0.7, min_p=0.1),
    "top-k": RowSampling(temperature=0.7, top_k=5),
    "top-p": RowSampling(temperature=0.7, top_p=0.9),
    "penalized": RowSampling(slot=0),
    "masked": RowSampling(mask=0),
    "log-probability": RowSampling(logprobs=True),
    "log-probabilities": RowSampling(logprobs=True, likeliest=True),
    "drawn, with log-probability": RowSampling(temperature=0.7, logprobs=True),
    "penalized, with log-probability": RowSampling(slot=0, logprobs=True),
    "masked, with log-probability": RowSampling(mask=0, logprobs=True),
    "transcript": RowSampling(transcript=0),
    "transcript with log-probability": RowSampling(transcript=0, logprobs=True),
}
LEAST = {
    "greedy": ("greedy", "greedy, whose filters say nothing"),
    "unfiltered": ("drawn", "min-p"),
    "filtered": ("top-k", "top-p"),
    "penalized": ("penalized",),
    "masked": ("masked",),
    "greedy_logprobs": ("log-probability", "log-probabilities"),
    "logprobs": tuple(f"{name}, with log-probability" for name in ("drawn", "penalized", "masked")),
    "transcript": ("transcript", "transcript with log-probability"),
}


def does(rows: tuple[RowSampling, ...]) -> set[str]:
    """What a sampler does that looks at these rows."""
    seen = SamplingTensors.over(dict.fromkeys(_FIELDS), rows)  # type: ignore[arg-type]
    done = {
        "draws": not seen.all_greedy,
        "filters": bool(seen.max_top_k) or seen.any_top_p,
        "penalizes": seen.any_rules,
        "masks": seen.any_masks,
        "holds transcripts": seen.any_transcripts,
        "gives log-probabilities": seen.any_logprobs,
        "gives the likeliest": seen.any_likeliest,
    }
    return {name for name, value in done.items() if value}


_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "step", "repetition", "presence", "frequency"),
    *("min_new", "slot", "biased", "mask", "transcript", "last_time", "paired", "probed"),
)


def test_rows_get_all_their_rules_in_any_mix() -> None:
    for names in itertools.product(ROWS, repeat=3):
        rows = tuple(ROWS[name] for name in names)
        assert does(rows) <= does(sampling_kind(rows)), names


@pytest.mark.parametrize("name", LEAST)
def test_a_row_alone_has_the_least_general_way(name: str) -> None:
    assert LEAST.keys() == {*DRAW_KINDS, SPEECH_KINDS[0]}
    for row in LEAST[name]:
        assert sampling_kind([ROWS[row]]) == KINDS[name], row


def test_every_way_is_that_of_some_rows() -> None:
    """A graph that no step asks for would be captured for nothing."""
    found = {sampling_kind([ROWS[one], ROWS[other]]) for one in ROWS for other in ROWS}
    assert found == set(KINDS.values())
