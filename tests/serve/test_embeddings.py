"""``/v1/embeddings``: the vectors of ``LLM.embed``, at unit length, in the shapes that clients ask for."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from torch.nn.functional import normalize

from ingot import LLM
from ingot.serve.api.embeddings_endpoint import EmbeddingCall
from ingot.serve.engine_calls.answering import Job
from ingot.serve.json_parts import in_parts
from ingot.serve.request_schemas import EmbeddingRequest
from ingot.serve.served_model import ServedModel
from tests.serve.client import PATIENCE, Server, wait_for
from tests.serve.conftest import MAX_SEQ_LEN, NAME, chat
from tests.serve.published import Schema

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["A fire broke out in a hotel.", "The match ended in a draw.", "Hi"]


def body(given: object = "Hi", **values: Any) -> dict[str, Any]:
    return {"model": NAME, "input": given, **values}


def vectors(server: Server, given: object, **values: Any) -> torch.Tensor:
    reply = server.post(EMBEDDINGS, body(given, **values))
    assert reply.status == 200, reply.data
    assert [one["index"] for one in reply.json["data"]] == list(range(len(reply.json["data"])))
    return torch.tensor([one["embedding"] for one in reply.json["data"]])


@pytest.mark.parametrize("pooling", [None, "mean", "last"])
def test_they_are_the_engines_own(server: Server, llm: LLM, pooling: str | None) -> None:
    expected = normalize(llm.embed(TEXTS, pooling or "mean"))
    found = vectors(server, TEXTS, pooling=pooling)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3), rtol=0, atol=1e-6)


def test_poolings_differ(server: Server) -> None:
    assert (
        vectors(server, TEXTS, pooling="mean") - vectors(server, TEXTS, pooling="last")
    ).abs().max() > 0.01


def test_every_form_of_input(server: Server, llm: LLM) -> None:
    """A text, its ids, and lists of either, as LangChain sends them."""
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    many = vectors(server, TEXTS)
    torch.testing.assert_close(vectors(server, ids), many, rtol=0, atol=1e-5)
    for given in (TEXTS[0], ids[0], [TEXTS[0]], [ids[0]]):
        torch.testing.assert_close(vectors(server, given), many[:1], rtol=0, atol=1e-5)


def test_base64_is_the_same_vector(server: Server) -> None:
    plain = vectors(server, TEXTS, encoding_format="float").numpy()
    data = server.post(EMBEDDINGS, body(TEXTS, encoding_format="base64")).json["data"]
    found = np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data])
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-6)


def test_the_published_shape(server: Server, published: Schema, llm: LLM) -> None:
    answer = server.post(EMBEDDINGS, body(TEXTS)).json
    published.check("CreateEmbeddingResponse", answer)
    assert llm.tokenizer is not None
    tokens = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["model"] == NAME


def test_openais_client(server: Server, llm: LLM) -> None:
    """It asks for base64 by default, and decodes it."""
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as api:
        found = api.embeddings.create(model=NAME, input=TEXTS)
        plain = api.embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
    expected = normalize(llm.embed(TEXTS))
    for answer in (found, plain):
        given = torch.tensor([one.embedding for one in answer.data])
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_more_inputs_than_the_queue_holds(server: Server) -> None:
    """LangChain sends a thousand at once: they run a batch after another, and others are let in between."""
    many = [[65 + i % 60, 1966] for i in range(700)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(vectors, server, many)
        assert server.post("/v1/chat/completions", chat(max_tokens=2)).status == 200
        found = asked.result()
    torch.testing.assert_close(found[:60], found[60:120], rtol=0, atol=1e-5)
    assert len(found) == 700


def test_who_leaves_frees_the_place(server: Server) -> None:
    many = {"model": NAME, "input": [[65] * 500] * 400}
    url = f"http://127.0.0.1:{server.port}/v1"
    api = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=0.3)
    with api, pytest.raises(openai.APITimeoutError):
        api.embeddings.create(**many)  # type: ignore[arg-type]
    before = server.metric("ingot_prompt_tokens_total")
    wait_for("its places to be free", server.idle)
    assert server.metric("ingot_prompt_tokens_total") - before < 500 * 400 / 2


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [10**6]}, "input"),
        ({"input": [[65], [10**6]]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": ["a b c d e " * 80] * 760}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 8}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused(server: Server, values: dict[str, Any], field: str) -> None:
    reply = server.post(EMBEDDINGS, body() | values)
    assert (reply.status, reply.error["param"]) == (400, field), reply.data


def test_an_input_that_is_too_long(server: Server) -> None:
    reply = server.post(EMBEDDINGS, body([[65], [65] * (MAX_SEQ_LEN + 1)]))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        400,
        "context_length_exceeded",
        "input[1]",
    )
    assert "max_tokens" not in reply.error["message"]
    assert vectors(server, [65] * MAX_SEQ_LEN).shape[0] == 1


def test_its_own_width_is_let_through(server: Server, llm: LLM) -> None:
    width = llm.engine.manifest.model.hidden_size
    assert vectors(server, "Hi", dimensions=width).shape == (1, width)


def test_an_unknown_model(server: Server) -> None:
    assert server.post(EMBEDDINGS, {"model": "none", "input": "a"}).error["code"] == "model_not_found"


class Batches:
    """An engine with room for three at once, whose vector of a prompt is its first id."""

    def __init__(self) -> None:
        self.limits = SimpleNamespace(max_batch_size=3, max_seq_len=9, vocab_size=100)
        self.places_taken: list[int] = []
        self.groups: list[list[Job]] = []

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        self.places_taken.append(count)
        yield

    @contextmanager
    def answering(self, jobs: Sequence[Job], tokenizer: None, *, by_piece: bool) -> Iterator[Any]:
        self.groups.append(list(jobs))
        vectors = {i: np.array([job.ids[0]], "<f4").tobytes() for i, job in enumerate(jobs)}
        yield SimpleNamespace(vectors=vectors, finish=partial(asyncio.sleep, 0))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7])
async def test_inputs_of_several_batches_are_one_answer(count: int) -> None:
    """Whatever an answer says is of all inputs, in their order."""
    engine = Batches()
    model = ServedModel.__new__(ServedModel)
    model.name, model.max_seq_len, model._threads = "m", 9, ThreadPoolExecutor(1)
    model.engine = engine  # type: ignore[assignment]
    model.side = SimpleNamespace(  # type: ignore[assignment]
        text=None, manifest=SimpleNamespace(model=SimpleNamespace(hidden_size=1))
    )
    model.prompt_ids = lambda prompt, **_: prompt  # type: ignore[method-assign]
    inputs = [[10 + i] * (1 + i % 5) for i in range(count)]
    request = EmbeddingRequest(model="m", input=inputs, cache_salt="s", pooling="last")
    answer = json.loads(
        b"".join([part async for part in in_parts(await EmbeddingCall(model, request).answer())])
    )
    tokens = sum(map(len, inputs))
    assert answer == {
        "object": "list",
        "model": "m",
        "data": [{"object": "embedding", "index": i, "embedding": [10.0 + i]} for i in range(count)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    assert [job.ids for group in engine.groups for job in group] == inputs
    assert {(job.pooling, job.salt, job.params) for group in engine.groups for job in group} == {
        ("last", "s", None)
    }
    assert [len(group) for group in engine.groups] == [3] * (count // 3) + [count % 3] * (count % 3 > 0)
    assert engine.places_taken == [min(count, 3)]
