"""The model repository in Triton Inference Server itself (docs/triton.md says how to get it)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.triton_server import TritonServer, started
from ingot import LLM, SamplingParams, build
from ingot.adapters.triton.model_repository import write_model
from ingot.adapters.triton.triton_settings import Settings
from tests.serve.client import ROOT

pytestmark = pytest.mark.slow
ENVIRONMENT = Path(os.environ.get("INGOT_TRITON_ENV", ROOT / ".venv-triton"))
PROMPT = "A fire broke out in a"
GREEDY = {"max_tokens": 24, "temperature": 0}
LONG = {"max_tokens": 160, "temperature": 0, "ignore_eos": True}
SMALL = 16  # requests at once
INFER = """
import sys, numpy as np, tritonclient.http as triton
client = triton.InferenceServerClient(sys.argv[1])
tensor = triton.InferInput("text_input", [1], "BYTES")
tensor.set_data_from_numpy(np.array([sys.argv[2].encode()], dtype=object))
values = {"max_tokens": 24, "temperature": 0.0}
print(client.infer("whole", [tensor], parameters=values).as_numpy("text_output")[0].decode(), end="")
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton") / "pocket"
    return build(ROOT / "models" / "pocket-chat", folder, device="cpu", max_batch_size=64, max_seq_len=512)


@pytest.fixture(scope="module")
def server(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Models for 64 requests at once, for few, and without streams."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(
            f"no {ENVIRONMENT}: make it as docs/triton.md says, or name another with INGOT_TRITON_ENV"
        )
    repository = tmp_path_factory.mktemp("repository")
    settings = Settings(str(engine), threads=1)
    write_model(repository, "pocket", settings, gpu=None, copy=True)
    small = Settings(str(engine), threads=1, max_batch_size=SMALL, max_queue=1)
    write_model(repository, "small", small, gpu=None, copy=False)
    config = write_model(repository, "whole", settings, gpu=None, copy=False) / "config.pbtxt"
    config.write_text(config.read_text().replace("decoupled: true", "decoupled: false"))
    with started(ENVIRONMENT, repository, tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(scope="module")
def alone(engine: Path) -> Any:
    """alone(prompt): the answer of an executor that has nothing else to do."""
    llm = LLM(engine, "cpu")
    return lambda text: llm.generate([text], SamplingParams(max_new_tokens=24))[0].text


def asked(server: TritonServer, model: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    return server.ask({"model": model, "requests": list(requests)})


def test_64_streams_each_get_the_text_that_they_would_get_alone(server: TritonServer, alone: Any) -> None:
    texts = [f"Story {i}: a fire broke out in a" for i in range(64)]
    found = asked(server, "pocket", *({"text_input": text, "values": GREEDY} for text in texts))
    assert [one["error"] for one in found] == [None] * 64
    assert [one["text"] for one in found] == [alone(text) for text in texts]
    assert {sum(one["tokens"]) for one in found} == {24}


def test_a_cancel_frees_its_place_within_a_step_of_being_asked_for(server: TritonServer) -> None:
    """All places are taken and one request waits. Another stream's tokens are the clock: between the cancel
    and the first token of the one that waited lie the current step, the one in which Triton is asked, and
    that token's own.
    """
    others = [{"text_input": f"Story {i}: a", "values": LONG} for i in range(SMALL - 1)]
    leaver = {"text_input": PROMPT, "values": LONG, "cancel_after": 40}
    waiter = {"text_input": PROMPT, "values": GREEDY, "delay": 0.3}
    *rest, left, waited = asked(server, "small", *others, leaver, waiter)
    assert waited["error"] is None
    assert waited["times"][0] > left["cancelled"]
    span = left["cancelled"], waited["times"][0]
    clocks = [zip(one["times"], one["tokens"], strict=True) for one in rest]
    steps = [sum(tokens for time, tokens in clock if span[0] < time <= span[1]) for clock in clocks]
    assert max(steps) <= 3, steps


def test_outputs_beside_the_text_and_errors(server: TritonServer) -> None:
    good, bad = asked(
        server,
        "pocket",
        {"text_input": PROMPT, "values": GREEDY, "extras": True},
        {"text_input": PROMPT, "values": {"temperature": -1}},
    )
    assert (good["finish_reason"], sum(good["tokens"])) == ("length", 24)
    assert good["num_input_tokens"] > 0
    assert "temperature is out of range" in bad["error"]


def test_a_full_queue_refuses(server: TritonServer) -> None:
    request = {"text_input": PROMPT, "values": GREEDY}
    found = asked(server, "small", *[request] * (SMALL + 4))
    refused = [one["error"] for one in found if one["error"] is not None]
    assert len(refused) == 3
    assert all("requests in flight or waiting" in error for error in refused)


def test_http_generates(server: TritonServer, alone: Any) -> None:
    body = {"text_input": PROMPT, "parameters": GREEDY}
    status, data = server.post("/v2/models/pocket/generate", body)
    assert (status, json.loads(data)["text_output"]) == (200, PROMPT + alone(PROMPT))
    status, data = server.post("/v2/models/pocket/generate_stream", {**body, "stream": True})
    events = [json.loads(line.removeprefix(b"data: ")) for line in data.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == alone(PROMPT)
    assert len(events) > 4
    status, data = server.post("/v2/models/pocket/generate", {"text_input": PROMPT, "parameters": {"n": 2}})
    assert (status, "more than one answer" in json.loads(data)["error"]) == (400, True)


def test_clients_without_streams_are_answered_where_decoupled_is_off(
    server: TritonServer, alone: Any
) -> None:
    answer = server.run("-c", INFER, f"127.0.0.1:{server.http}", PROMPT)
    assert answer == PROMPT + alone(PROMPT)


def test_the_example_prints_the_answer(server: TritonServer, alone: Any) -> None:
    words = ("pocket", PROMPT, "--url", f"127.0.0.1:{server.grpc}", "--max-tokens", "24")
    answer = server.run(str(ROOT / "examples" / "clients" / "triton_stream.py"), *words)
    assert answer == alone(PROMPT) + "\n"
