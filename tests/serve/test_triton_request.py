"""Translation of Triton requests to engine requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingot.adapters.triton.triton_request import DEFAULT_TOKENS, read
from ingot.config.sampling_params import SamplingParams
from ingot.serve.api_errors import ApiError

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)


def params(values: dict[str, Any], **tensors: Any) -> SamplingParams:
    return read({"text_input": "A fire", **tensors}, json.dumps(values)).params(DEFAULTS, 1000)


def test_values_that_are_not_named_are_the_engine_s() -> None:
    assert params({}) == DEFAULTS.replace(max_new_tokens=DEFAULT_TOKENS)


def test_values_have_the_names_of_completions() -> None:
    values = {
        "max_tokens": 5, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1,
        "min_p": 0.1, "seed": 7, "stop": ["\n", "END"], "stop_token_ids": [3], "ignore_eos": True,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "n": 1,
    }  # fmt: skip
    assert params(values) == SamplingParams(
        max_new_tokens=5, min_new_tokens=2, temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, seed=7,
        stop=("\n", "END"), stop_token_ids=(3,), ignore_eos=True, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3,
    )  # fmt: skip


def test_numbers_may_be_text() -> None:
    found = params({"temperature": "0.1", "top_p": "0.95", "max_tokens": "100", "ignore_eos": "true"})
    assert (found.temperature, found.top_p, found.max_new_tokens, found.ignore_eos) == (0.1, 0.95, 100, True)


def test_one_stop_string_may_be_a_text() -> None:
    assert params({"stop": "END"}).stop == ("END",)


def test_the_tensor_takes_the_place_of_the_request_s_parameters() -> None:
    found = params({"max_tokens": 3}, sampling_parameters='{"temperature": 0}')
    assert (found.max_new_tokens, found.temperature) == (DEFAULT_TOKENS, 0)


@pytest.mark.parametrize(
    ("tensors", "stream", "echo"),
    [
        ({}, False, True),
        ({"stream": False}, False, True),
        ({"stream": True}, True, False),
        ({"exclude_input_in_output": True}, False, False),
        ({"exclude_input_in_output": False}, False, True),
        ({"stream": True, "exclude_input_in_output": True}, True, False),
    ],
)
def test_full_answers_repeat_the_prompt_like_vllms(
    tensors: dict[str, bool], stream: bool, echo: bool
) -> None:
    found = read({"text_input": "A fire", **tensors}, "{}")
    assert (found.stream, found.echo) == (stream, echo)


def test_optional_outputs_are_requested() -> None:
    found = read({"text_input": "A", "return_finish_reason": True, "return_num_input_tokens": False}, "{}")
    assert found.extras == {"finish_reason"}


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ('{"max_token": 5}', "unknown field `max_token`"),
        ("{", "sampling_parameters is not valid JSON"),
        ("[]", "Expected `object`"),
        ('{"n": 2}', "n: more than one answer is not supported"),
        ('{"max_tokens": 0}', "max_tokens: Expected `int` >= 1"),
        ('{"temperature": "warm"}', "temperature: Expected `float | null`"),
        ('{"stop": ""}', "stop: Expected `str` of length >= 1"),
        ('{"stream_options": {}}', "stream_options: a field of OpenAI's API"),
        ('{"model": "m"}', "model: a field of OpenAI's API"),
    ],
)
def test_impossible_values_are_refused(values: str, reported: str) -> None:
    with pytest.raises(ApiError) as error:
        read({"text_input": "A"}, values)
    assert error.value.status == 400
    assert reported in error.value.message


@pytest.mark.parametrize("value", ["nan", "inf", -1])
def test_a_temperature_out_of_range_is_refused(value: object) -> None:
    with pytest.raises(ApiError, match="temperature is out of range"):
        params({"temperature": value})


def test_a_stream_never_repeats_the_prompt() -> None:
    with pytest.raises(ApiError, match="exclude_input_in_output must be true"):
        read({"text_input": "A", "stream": True, "exclude_input_in_output": False}, "{}")
