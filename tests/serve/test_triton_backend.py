"""The backend with a real engine process and a fake Triton (``fake_triton``)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM
from tests.serve import fake_triton
from tests.serve.client import wait_for
from tests.serve.fake_triton import ModelError, Request

PROMPT = "A fire broke out in a"
LONG = '{"max_tokens": 400, "ignore_eos": true, "temperature": 0}'
GREEDY = '{"max_tokens": 24, "temperature": 0}'


def opened(folder: Path, decoupled: bool = True, **parameters: str) -> Any:
    """A backend as Triton starts it."""
    from ingot.adapters.triton.backend import Backend

    texts = {"engine": str(folder), "threads": "1"} | parameters
    config = {"parameters": {k: {"string_value": v} for k, v in texts.items()}, "decoupled": decoupled}
    args = {"model_config": json.dumps(config), "model_instance_kind": "CPU", "model_instance_device_id": "0"}
    return Backend({**args, "model_repository": "/nowhere", "model_version": "1", "model_name": "pocket"})


@pytest.fixture(scope="module", autouse=True)
def triton() -> Iterator[None]:
    """The module that only Triton's own process has."""
    sys.modules["triton_python_backend_utils"] = fake_triton.module()
    yield
    del sys.modules["triton_python_backend_utils"]
    sys.modules.pop("ingot.adapters.triton.backend", None)


@pytest.fixture(scope="module")
def backend(engine: Path) -> Iterator[Any]:
    """For four requests at once and two that wait."""
    found = opened(engine, max_batch_size="4", max_queue="2")
    yield found
    found.close()


def asked(backend: Any, parameters: str = GREEDY, text: str = PROMPT, **tensors: Any) -> Any:
    """The response sender of a new request."""
    request = Request({"text_input": text, **tensors}, parameters)
    backend.execute([request])
    return request.sender


def answer(llm: LLM, **values: Any) -> str:
    """What the engine says in this process."""
    return str(llm.generate([PROMPT], **{"max_new_tokens": 24, "temperature": 0, **values})[0].text)


def test_a_stream_and_a_full_answer_equal_the_engines(backend: Any, llm: LLM) -> None:
    text = answer(llm)
    stream, whole = asked(backend, stream=True), asked(backend)
    alone = asked(backend, exclude_input_in_output=True)
    parts = stream.parts()
    assert len(parts) > 4
    assert all(set(part) == {"text_output"} for part in parts)
    assert "".join(part["text_output"] for part in parts) == text
    assert [part["text_output"] for part in whole.parts()] == [PROMPT + text]
    assert alone.text() == text
    assert stream.broken + whole.broken + alone.broken == []


@pytest.mark.slow
def test_streams_side_by_side_are_what_they_are_alone(backend: Any) -> None:
    texts = [f"Story {i}: a fire broke out in a" for i in range(6)]
    alone = [asked(backend, text=text, stream=True).text() for text in texts]
    senders = [asked(backend, text=text, stream=True) for text in texts]
    assert [sender.text() for sender in senders] == alone
    assert len(set(alone)) > 1


def test_a_seed_and_stop_strings_are_the_request_s(backend: Any, llm: LLM) -> None:
    values = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "stop": [" the"]}
    text = answer(llm, max_new_tokens=40, temperature=1.0, seed=5, stop=(" the",))
    assert asked(backend, json.dumps(values), stream=True).text() == text


def test_pictures_are_refused_by_a_model_of_text(backend: Any) -> None:
    error = asked(backend, text="<ImageHere>", image=["AA==", "AA=="]).error()
    assert (error.code, error.message) == ("INVALID_ARG", "image: pocket does not take images")


def test_optional_outputs(backend: Any, llm: LLM) -> None:
    extras = {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
    *parts, last = asked(backend, stream=True, **extras).parts()
    assert {part["finish_reason"] for part in parts} == {"None"}
    assert last["finish_reason"] == "length"
    assert sum(part["num_output_tokens"] for part in [*parts, last]) == 24
    assert {part["num_input_tokens"] for part in [*parts, last]} == {len(llm.prompt_ids(PROMPT))}


@pytest.mark.parametrize(
    ("tensors", "parameters", "reported"),
    [
        ({"text_input": "A"}, '{"max_token": 3}', "unknown field `max_token`"),
        ({"text_input": "A"}, '{"temperature": -1}', "temperature is out of range"),
        ({"text_input": ["A", "B"]}, "", "text_input holds 2 values"),
        ({"text_input": b"\xff"}, "", "text_input is not UTF-8"),
        ({"text_input": ""}, "", "text_input is empty"),
        ({"text_input": "A fire " * 400}, "", "maximum context length is 512"),
        ({"text_input": "A"}, '{"max_tokens": 600}', "maximum context length is 512"),
    ],
)
def test_unsupported_values_are_invalid_arguments(
    backend: Any, tensors: Any, parameters: str, reported: str
) -> None:
    request = Request(tensors, parameters)
    backend.execute([request])
    error = request.sender.error()
    assert error.code == "INVALID_ARG"
    assert reported in error.message


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_request_frees_its_place(backend: Any, stream: bool) -> None:
    senders = [asked(backend, LONG, stream=stream) for _ in range(6)]
    refused = asked(backend, LONG)
    error = refused.error()
    assert error.code == "UNAVAILABLE"
    assert "already has 6 requests in flight" in error.message
    for sender in senders:
        sender.cancelled = True
    assert {sender.error().code for sender in senders} == {"CANCELLED"}
    assert asked(backend, stream=stream).text()
    assert [sender.broken for sender in senders] == [[]] * 6


@pytest.mark.slow
def test_a_model_that_is_not_decoupled_gives_full_answers_until_it_is_closed(engine: Path, llm: LLM) -> None:
    found = opened(engine, decoupled=False)
    text = answer(llm)
    assert [part["text_output"] for part in asked(found).parts()] == [PROMPT + text]
    assert "does not stream" in asked(found, stream=True).error().message
    sender = asked(found, LONG)
    wait_for("it to run", lambda: found._service._model.engine.gauges.running == 1)
    process = found._service._model.engine._run._process
    found.close()
    error = sender.error()
    assert (error.code, error.message) == ("UNAVAILABLE", "the server is stopping")
    assert process.poll() is not None


def test_the_end_of_the_engine_is_reported(backend: Any) -> None:
    """The last test of the common backend, which is closed after it."""
    sender = asked(backend, LONG, stream=True)
    sender.next()
    assert backend.is_ready
    process: subprocess.Popen[bytes] = backend._service._model.engine._run._process
    os.kill(process.pid, signal.SIGKILL)
    error = sender.error()
    assert (error.code, "process has ended" in error.message) == ("INTERNAL", True)
    assert asked(backend).error().code == "UNAVAILABLE"
    assert not backend.is_ready


@pytest.mark.parametrize(
    ("parameters", "reported"),
    [
        ({"engine": "/no/such/engine"}, "not an engine folder"),
        pytest.param({"max_batch_size": "64"}, "max_batch_size", marks=pytest.mark.slow),
        ({"max_batchsize": "4"}, "unknown parameter in config.pbtxt"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(engine: Path, parameters: Any, reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        opened(engine, **parameters)
