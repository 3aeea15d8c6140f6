"""Pictures on their way from requests to an engine, without either: slots, bounds, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from ingot.config.server_config import ServeConfig
from ingot.errors import RequestError
from ingot.llm.picture_prompts import Pictures
from ingot.serve.api.chat_completions import ChatCall
from ingot.serve.api_errors import ApiError
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.process_protocol import Add, LoadEngine, Ready
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.engine_calls.speech_windows import WindowReader
from ingot.serve.grammar_checks import GrammarChecks
from ingot.serve.picture_service import MOST_HELD, ServedPictures
from ingot.serve.request_schemas import ChatRequest, decode
from ingot.serve.served_model import ServedModel, TextSide
from ingot.text.prompt import Input
from tests.vision.conftest import POCKET, image

QUERIES = 16


class Sent(list[Any]):
    """What an engine's process would have been sent."""

    def send(self, *messages: Any) -> None:
        self += messages


@pytest.fixture(scope="module")
def side() -> TextSide:
    return TextSide.read("m", POCKET)


@pytest.fixture
def model(side: TextSide) -> Iterator[ServedModel]:
    engine = EngineClient("m", LoadEngine("nowhere"), ServeConfig(), Metrics().of("m"), side.features)
    engine.limits = Ready(20_000, 8, MOST_HELD * QUERIES * 2)
    engine._run = Sent()  # type: ignore[assignment]
    model = ServedModel(side, engine, GrammarChecks())
    yield model
    model.close()


def talk(count: int) -> list[dict[str, Any]]:
    parts = [image(f"data:,{i}") for i in range(count)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is there?"}]}]


def call(model: ServedModel, count: int) -> ChatCall:
    body = {"model": "m", "messages": talk(count), "max_tokens": 1}
    return ChatCall(model, decode(ChatRequest, json.dumps(body).encode()))


def pictures_of(model: ServedModel) -> ServedPictures:
    assert model.pictures is not None
    return model.pictures


def test_so_many_pictures_are_held_at_once(model: ServedModel) -> None:
    pictures = pictures_of(model)
    with pictures.slots(MOST_HELD - 1) as many, pictures.slots(1) as one:
        assert {*many, *one} == set(range(MOST_HELD))
        with pytest.raises(ApiError, match=r"holds 512 of 512 images") as full, pictures.slots(1):
            pass
        assert (full.value.status, full.value.code) == (429, "queue_full")
        assert full.value.headers == {"Retry-After": "1"}
    with pictures.slots(MOST_HELD) as all_of_them:
        assert len(all_of_them) == MOST_HELD
    with pytest.raises(ApiError, match=r"513 images; m takes 512") as never, pictures.slots(MOST_HELD + 1):
        pass
    assert never.value.status == 400


async def test_a_request_beyond_them_is_refused_before_it_is_decoded(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pictures, "read", lambda *_: pytest.fail("decoded"))
    with pictures_of(model).slots(MOST_HELD - 2), pytest.raises(ApiError) as full:
        await call(model, 3).answer()
    assert full.value.status == 429
    with pytest.raises(ApiError) as long:
        await call(model, 2 * MOST_HELD).answer()
    assert long.value.code == "context_length_exceeded"
    assert model.engine._taken == 0


async def test_the_engine_is_reported_of_slots_that_hold_the_pictures(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the prompt, at the places of their placeholders."""

    def read(_: Pictures, source: str) -> Input:
        return Input(torch.full((3, 112, 112), float(source.removeprefix("data:,"))))

    monkeypatch.setattr(Pictures, "read", read)
    with ExitStack() as others:
        others.enter_context(pictures_of(model).slots(5))
        task = asyncio.ensure_future(call(model, 3).answer())
        sent: Any = model.engine._run
        async with asyncio.timeout(30):
            while not sent:
                await asyncio.sleep(0.001)
        (add,) = sent
        assert isinstance(add, Add)
        assert model.engine.windows is not None
        reader = WindowReader(*model.engine.windows.handle)
        assert [float(reader.get(slot).mean()) for slot, _ in add.pictures] == [0, 1, 2]
        placeholder = add.prompt_ids[add.pictures[0][1]]
        for (_, place), before in zip(add.pictures, add.prompt_ids, strict=False):
            assert add.prompt_ids[place : place + QUERIES] == [placeholder] * QUERIES
            assert before != placeholder
            assert add.prompt_ids[place - 1] != placeholder
        assert add.prompt_ids.count(placeholder) == 3 * QUERIES
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert model.engine.windows.taken == 5


async def test_a_client_that_leaves_ends_the_decoding(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture that is being decoded is the last; its slot is taken until then, and no longer."""
    begun, go_on, read = threading.Event(), threading.Event(), []

    def slow(_: Pictures, source: str) -> Input:
        read.append(source)
        begun.set()
        assert go_on.wait(30)
        return Input(torch.zeros(3, 112, 112))

    monkeypatch.setattr(Pictures, "read", slow)
    task = asyncio.ensure_future(call(model, 9).answer())
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    await asyncio.sleep(0.01)
    windows = model.engine.windows
    assert windows is not None
    assert (task.done(), windows.taken, model.engine._taken) == (False, 9, 1)
    go_on.set()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    assert (read, windows.taken, model.engine._taken) == (["data:,0"], 0, 0)
    assert not model.engine._run  # type: ignore[truthy-bool]


async def test_a_picture_that_cannot_be_read_gives_all_back(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: Pictures, source: str) -> Input:
        if source == "data:,1":
            raise RequestError("this is no picture")
        return Input(torch.zeros(3, 112, 112))

    monkeypatch.setattr(Pictures, "read", read)
    with pytest.raises(ApiError, match=r"messages\[0\].content\[1\]: this is no picture") as refused:
        await call(model, 4).answer()
    assert (refused.value.status, refused.value.param) == (400, "messages[0].content[1]")
    assert model.engine.windows is not None
    assert (model.engine.windows.taken, model.engine._taken) == (0, 0)
