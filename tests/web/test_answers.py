"""What the page asks a server for, and what it shows of it. None of it needs Gradio."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from ingot.adapters.web.page_answers import Shown, answers, is_empty
from ingot.adapters.web.page_client import AnswerError, Api, ConversationTooLongError, ListedModel, TextDelta
from ingot.adapters.web.page_messages import MOST_PICTURE, Values, body
from tests.web.upstream import NAME, Upstream, delta, end, upstream

HELLO = [delta("Hel"), ": a comment", delta("lo"), end(), "data: [DONE]"]


async def last(server: Upstream | str, key: str | None = None, model: str | None = NAME) -> Shown:
    """The picture that an answer ends with."""
    async with Api(server if isinstance(server, str) else server.url, key) as api:
        shown = [one async for one in answers(api, model, "", [], "Hi", Values())]
    assert [one.ended for one in shown] == [False] * (len(shown) - 1) + [True]
    return shown[-1]


async def test_an_answer_is_put_together() -> None:
    with upstream(HELLO) as server:
        assert await last(server) == Shown(text="Hello", ended=True)
    assert server.bodies == [{"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "stream": True}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thoughts_are_kept_apart(name: str) -> None:
    with upstream([delta(**{name: "Let me "}), delta(**{name: "see."}), delta("42"), end()]) as server:
        assert await last(server) == Shown(thought="Let me see.", text="42", ended=True)


async def test_an_answer_is_shown_while_it_grows() -> None:
    go_on = threading.Event()
    with upstream([delta("one"), go_on, delta(" two"), end()]) as server:
        async with Api(server.url, None) as api:
            pictures = answers(api, NAME, "", [], "Hi", Values())
            assert await anext(pictures) == Shown(text="one")
            go_on.set()
            assert [one async for one in pictures][-1] == Shown(text="one two", ended=True)


async def test_a_closed_answer_ends_on_the_server() -> None:
    with upstream([delta("one"), threading.Event()]) as server:
        async with Api(server.url, None) as api:
            pictures = answers(api, NAME, "", [], "Hi", Values())
            await anext(pictures)
            assert not server.left.is_set()
            await pictures.aclose()
            assert await asyncio.to_thread(server.left.wait, 10)


async def test_pictures_come_while_the_server_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.adapters.web.page_answers.BEAT_SECONDS", 0.06)
    go_on = threading.Event()
    with upstream([delta("one"), delta(" two"), go_on, delta(" three"), end()]) as server:
        async with Api(server.url, None) as api:
            pictures = answers(api, NAME, "", [], "Hi", Values())
            while (await anext(pictures)).text != "one two":
                continue
            assert (await anext(pictures)).text == "one two"
            go_on.set()
            assert [one async for one in pictures][-1].text == "one two three"


def refusal(status: int, message: str, **headers: str) -> dict[str, Any]:
    return {"status": status, "said": {"error": {"message": message}}, "headers": headers}


@pytest.mark.parametrize(
    ("served", "shown"),
    [
        (refusal(401, "no"), "The server refused the key. Start the page with the server's key"),
        (refusal(429, "m is full", **{"Retry-After": "7"}), "is busy: m is full. Try again in 7 s."),
        (refusal(400, "messages: too long."), "The server refused the request (400): messages: too long."),
        (refusal(503, "m: dead", **{"Retry-After": "5"}), "request (503): m: dead. Try again in 5 s."),
        ({"status": 502, "said": "<html>"}, "The server refused the request (502): Bad Gateway."),
        ({"status": 404, "said": {"error": "no such page"}}, "request (404): no such page."),
    ],
)  # fmt: skip
async def test_a_refusal_is_reported(served: dict[str, Any], shown: str) -> None:
    with upstream(**served) as server:
        found = await last(server)
    assert shown in found.error
    assert not found.text


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([delta("half"), 'data: {"error": {"message": "the engine has died"}}'], "the engine has died"),
        ([delta("half")], "The server ended the answer early."),
        ([delta("half"), "data: {"], "The server sent what is no chunk of an answer."),
        ([delta("half"), "data: 3"], "The server sent what is no chunk of an answer."),
    ],
)
async def test_what_came_before_an_error_stays(chunks: list[Any], shown: str) -> None:
    with upstream(chunks) as server:
        assert await last(server) == Shown(text="half", error=shown, ended=True)


async def test_a_server_that_is_away_is_reported() -> None:
    with upstream() as server:
        pass
    assert (await last(server.url)).error == f"No server answers at {server.url}. Is it running?"


async def test_a_server_that_came_later_is_asked_for_its_first_model() -> None:
    with upstream(HELLO) as server:
        assert (await last(server, model=None)).text == "Hello"
    assert server.bodies[0]["model"] == NAME


async def test_the_key_goes_with_every_request_and_is_in_no_message() -> None:
    with upstream(**refusal(401, "no")) as server:
        found = await last(server, "secret", model=None)
    assert server.keys == ["Bearer secret", "Bearer secret"]
    assert "secret" not in repr(found)


async def test_models_and_what_they_take() -> None:
    takes = {"id": "sees", "input_modalities": ["text", "image"]}
    with upstream(models=[{"id": "reads", "max_model_len": 64}, takes]) as server:
        async with Api(server.url, None) as api:
            found = await api.models()
    assert [(one.name, one.max_len, set(one.inputs)) for one in found] == [
        ("reads", 64, set()),
        ("sees", None, {"image"}),
    ]


@pytest.mark.parametrize(
    ("models", "why"), [([], "lists no models"), ([{"name": "x"}], "is it an OpenAI-compatible server")]
)
async def test_a_server_without_models_is_reported(models: list[Any], why: str) -> None:
    with upstream(models=models) as server:
        async with Api(server.url, None) as api:
            with pytest.raises(AnswerError, match=why):
                await api.models()


def said(role: str, text: str, title: str | None = None) -> dict[str, Any]:
    """A message as Gradio keeps it."""
    return {"role": role, "content": [{"type": "text", "text": text}], "metadata": {"title": title}}


def test_the_system_prompt_comes_first_and_the_page_s_own_messages_are_left_out() -> None:
    history = [
        said("user", "What is 1 + 1?"),
        said("assistant", "One, and one.", title="Thoughts"),
        said("assistant", "2"),
        said("user", "And then?"),  # was not answered
        said("assistant", "The server is busy.", title="No answer"),
    ]
    found = body("m", "Be brief.", history, "And 2 + 2?", Values())
    assert found["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2 + 2?"},
    ]


def test_only_chosen_values_are_sent() -> None:
    own = Values(own=True, temperature=1.5, max_tokens=7, seed=3).to_json()
    assert own == {"max_tokens": 7, "seed": 3}
    chosen = Values(own=False, temperature=0.5, top_p=0.9, top_k=4, repetition_penalty=1.1).to_json()
    assert chosen == {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "repetition_penalty": 1.1}


def test_files_become_parts(tmp_path: Path) -> None:
    picture, sound = tmp_path / "a.png", tmp_path / "b.wav"
    picture.write_bytes(b"P")
    sound.write_bytes(b"S")
    shown = [{"role": "user", "content": [{"type": "file", "file": {"path": str(picture)}}]}]
    answer = said("assistant", "A letter.")
    found = body("m", "", [*shown, answer], {"text": "And this?", "files": [str(sound)]}, Values())
    assert found["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,UA=="}}
    ]
    assert found["messages"][2]["content"] == [
        {"type": "input_audio", "input_audio": {"data": "Uw==", "format": "wav"}},
        {"type": "text", "text": "And this?"},
    ]


EARS = {"id": NAME, "input_modalities": ["audio"]}
HEARD = {
    "text": " Hello there. Again.",
    "segments": [
        {"start": 0.0, "end": 2.5, "text": " Hello there."},
        {"start": 61.04, "end": 63.0, "text": " Again."},
    ],
}


async def transcribed(server: Upstream, files: list[str]) -> Shown:
    """The last picture of what becomes of recordings."""
    async with Api(server.url, None) as api:
        said = {"text": "", "files": files}
        return [one async for one in answers(api, NAME, "", [], said, Values())][-1]


async def test_recordings_become_transcripts_with_times(tmp_path: Path) -> None:
    recording = tmp_path / "talk.wav"
    recording.write_bytes(b"RIFF, and what is said")
    with upstream(models=[EARS], said=HEARD) as server:
        shown = await transcribed(server, [str(recording)])
        assert shown == Shown(
            text="**0:00.0 – 0:02.5** Hello there.\n\n**1:01.0 – 1:03.0** Again.", ended=True
        )
        assert b"RIFF, and what is said" in server.forms[0]
        assert b'filename="talk.wav"' in server.forms[0]
        assert (await transcribed(server, [str(recording)] * 2)).text.count("Again.") == 2
        server.said = {"text": "", "segments": []}
        assert (await transcribed(server, [str(recording)])).text == "No speech was found."
        server.said = []
        assert "no transcript" in (await transcribed(server, [str(recording)])).error
        server.status, server.said = 400, {"error": {"message": "this is no audio that can be read"}}
        assert "this is no audio that can be read" in (await transcribed(server, [str(recording)])).error
    assert server.bodies == []


async def test_a_file_that_is_gone_is_named() -> None:
    """Gradio keeps files of old messages in a folder that the system may empty."""
    history = [
        {"role": "user", "content": [{"type": "file", "file": {"path": "/no/such/cat.png"}}]},
        {"role": "assistant", "content": "A cat."},
    ]
    with upstream(HELLO) as server:
        async with Api(server.url, None) as api:
            shown = [one async for one in answers(api, NAME, "", history, "And now?", Values())]
    assert shown == [Shown(error="cat.png is gone. Clear the chat and add it again.", ended=True)]
    assert server.bodies == []


async def test_pictures_that_are_too_large_are_named_and_not_asked_about_again(tmp_path: Path) -> None:
    """The message was not answered, so the next request is without it."""
    large, good = tmp_path / "large.png", tmp_path / "good.png"
    large.write_bytes(bytes(MOST_PICTURE + 1))
    good.write_bytes(bytes(MOST_PICTURE))
    with upstream(HELLO) as server:
        async with Api(server.url, None) as api:

            async def ask(history: list[dict[str, Any]], file: Path) -> Shown:
                asked = {"text": "What is it?", "files": [str(file)]}
                return [one async for one in answers(api, NAME, "", history, asked, Values())][-1]

            shown = await ask([], large)
            assert shown.error == "large.png is larger than 11 MiB. Send a smaller picture."
            assert server.bodies == []
            before = {"role": "user", "content": [{"type": "file", "file": {"path": str(large)}}]}
            title = {"role": "assistant", "content": shown.error, "metadata": {"title": "No answer"}}
            assert (await ask([before, title], good)).text == "Hello"
    (one,) = server.bodies[0]["messages"]
    assert len(one["content"][0]["image_url"]["url"]) < 15 << 20


@pytest.mark.parametrize("choices", [[7], ["a"], [{"delta": 7}], [{"delta": {"content": [1]}}], {"a": 1}])
async def test_chunks_of_another_shape_are_reported(choices: Any) -> None:
    with upstream([delta("one"), "data: " + json.dumps({"choices": choices}), end()]) as server:
        shown = await last(server)
    assert shown == Shown(text="one", error="The server sent what is no chunk of an answer.", ended=True)


class Full:
    """A server whose context takes so many messages."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[list[str]] = []

    async def models(self) -> list[ListedModel]:
        return [ListedModel(NAME)]

    async def answer(self, asked: dict[str, Any]) -> AsyncGenerator[TextDelta, None]:
        self.asked.append([one["content"] for one in asked["messages"]])
        if len(asked["messages"]) > self.most:
            raise ConversationTooLongError("The conversation is too long.")
        yield TextDelta(text="Yes.")


TALK = [{"role": role, "content": f"{role} {turn}"} for turn in range(3) for role in ("user", "assistant")]


@pytest.mark.parametrize(
    ("most", "last"),
    [
        (8, ["sys", *(one["content"] for one in TALK), "new"]),
        (7, ["sys", *(one["content"] for one in TALK[2:]), "new"]),
        (5, ["sys", *(one["content"] for one in TALK[4:]), "new"]),
        (2, ["sys", "new"]),
    ],
)
async def test_the_oldest_turns_are_left_out_of_a_full_context(most: int, last: list[str]) -> None:
    api: Any = Full(most)
    shown = [one async for one in answers(api, NAME, "sys", TALK, "new", Values())]
    assert shown[-1] == Shown(text="Yes.", ended=True)
    assert api.asked[-1] == last
    assert len(api.asked) == 1 + (8 - len(last)) // 2


async def test_a_question_that_is_too_long_alone_is_reported() -> None:
    api: Any = Full(0)
    shown = [one async for one in answers(api, NAME, "sys", TALK, "new", Values())]
    assert shown == [Shown(error="The conversation is too long.", ended=True)]
    assert api.asked[-1] == ["sys", "new"]


@pytest.mark.parametrize(
    ("status", "error", "is_too_long"),
    [
        (400, {"message": "no", "code": "context_length_exceeded"}, True),
        (400, {"message": "This model's maximum context length is 512 tokens."}, True),
        (413, {"message": "the body is larger than 16777216 bytes"}, True),
        (400, {"message": "no", "code": "other"}, False),
    ],
)
async def test_which_refusals_are_about_the_length(
    status: int, error: dict[str, str], is_too_long: bool
) -> None:
    with upstream(status=status, said={"error": error}) as server:
        async with Api(server.url, None) as api:
            with pytest.raises(AnswerError) as served:
                await anext(api.answer({"messages": []}))
    assert isinstance(served.value, ConversationTooLongError) is is_too_long


@pytest.mark.parametrize("said", ["", " \n", {"text": " ", "files": []}, {"text": None}, None])
def test_what_is_empty(said: Any) -> None:
    assert is_empty(said)


@pytest.mark.parametrize("said", ["a", {"text": "a"}, {"text": "", "files": ["a.png"]}])
def test_what_is_not_empty(said: Any) -> None:
    assert not is_empty(said)
