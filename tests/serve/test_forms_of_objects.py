"""Objects in forms, as OpenAI's clients send them: ``chunking_strategy[type]``."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from starlette.datastructures import UploadFile

from ingot.serve.api_errors import ApiError
from ingot.serve.http.form_bodies import _form
from ingot.serve.request_schemas import AUDIO_LISTS, AudioRequest, decode


def values(*fields: tuple[str, str]) -> dict[str, Any]:
    file = UploadFile(io.BytesIO(b"RIFF"), size=4, filename="a.wav")
    found: dict[str, Any] = json.loads(_form([*fields, ("file", file)], 100, AUDIO_LISTS).json)
    return found


def test_their_fields_form_one_object() -> None:
    strategy = [("chunking_strategy[type]", "server_vad"), ("chunking_strategy[threshold]", "0.5")]
    assert values(("model", "m"), *strategy) == {
        "model": "m",
        "chunking_strategy": {"type": "server_vad", "threshold": "0.5"},
    }
    assert values(("timestamp_granularities[]", "word"), ("odd[", "1"), ("odd[a][b]", "1")) == {
        "timestamp_granularities": ["word"],
        "odd[": "1",
        "odd[a][b]": "1",
    }


def test_a_field_without_a_value_is_not_there() -> None:
    assert values(("model", "m"), ("language", ""), ("prompt", ""), ("prompt", "Hi")) == {
        "model": "m",
        "prompt": "Hi",
    }


def test_they_are_refused_by_name() -> None:
    data = json.dumps(values(("model", "m"), ("chunking_strategy[type]", "server_vad"))).encode()
    with pytest.raises(ApiError, match="voice activity detection") as caught:
        decode(AudioRequest, data, strict=False)
    assert caught.value.param == "chunking_strategy"
    assert decode(AudioRequest, b'{"model": "m", "chunking_strategy": "auto"}', strict=False).model == "m"


@pytest.mark.parametrize("turned", [False, True])
def test_both_ways_at_once_are_refused(turned: bool) -> None:
    both = [("chunking_strategy", "auto"), ("chunking_strategy[type]", "server_vad")]
    with pytest.raises(ApiError, match="is there twice"):
        values(*(both[::-1] if turned else both))
