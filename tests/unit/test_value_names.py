"""The names that type checkers know are those that calls take."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any

import pytest

from ingot.config.sampling_params import SamplingParams, SamplingValues
from ingot.llm.llm import LLM
from ingot.speech.speech_options import TranscribeOptions, TranscribeValues
from ingot.speech.transcriber import EngineValues


def names(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_sampling_values() -> None:
    assert set(SamplingValues.__annotations__) == names(SamplingParams) | {"max_tokens"}


def test_options_of_speech() -> None:
    assert set(TranscribeValues.__annotations__) == names(TranscribeOptions)


def test_options_of_an_engine() -> None:
    taken = set(inspect.signature(LLM.__init__).parameters) - {"self", "path", "device"}
    assert set(EngineValues.__annotations__) == taken


@pytest.mark.parametrize(
    ("kind", "values"), [(SamplingParams, SamplingValues), (TranscribeOptions, TranscribeValues)]
)
def test_types_allow_what_the_fields_allow(kind: type[Any], values: type[Any]) -> None:
    """Plain types are the same; lists and tuples are sequences."""
    fields, taken = typing.get_type_hints(kind), typing.get_type_hints(values)
    plain = (int, float, bool, str)
    for name in names(kind):
        is_union = typing.get_origin(fields[name]) is types.UnionType
        union = set(typing.get_args(fields[name])) if is_union else {fields[name]}
        if union <= {*plain, type(None)}:
            assert taken[name] == fields[name], name
