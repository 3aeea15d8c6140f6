"""Defaults that a request takes from a generation_config."""

from __future__ import annotations

from ingot.config.sampling_params import SamplingParams
from ingot.llm.sampling_defaults import default_params, read_defaults

FILTERS = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}


def test_without_do_sample_it_is_greedy() -> None:
    """Published files often hold a temperature and filters that then mean nothing."""
    for generation in ({}, FILTERS, FILTERS | {"do_sample": False}, FILTERS | {"do_sample": None}):
        assert default_params(generation) == SamplingParams(temperature=0.0)


def test_with_do_sample_its_values_hold() -> None:
    params = default_params(FILTERS | {"do_sample": True})
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert default_params({"do_sample": True}).temperature == 1.0


def test_penalties_and_lengths_hold_either_way() -> None:
    for sampled in (True, False):
        params = default_params({"do_sample": sampled, "repetition_penalty": 1.2, "max_new_tokens": 5})
        assert (params.repetition_penalty, params.max_new_tokens) == (1.2, 5)


def test_values_out_of_range_are_skipped_and_reported() -> None:
    found = read_defaults({"do_sample": True, "top_p": 7, "top_k": 3})
    assert found.refused == {"top_p": 7}
    assert (found.params.top_p, found.params.top_k) == (SamplingParams().top_p, 3)
    assert found.used == {"temperature", "top_k"}
