"""Pictures in LangChain's messages, of the shipped picture model."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from ingot import LLM
from ingot.errors import RequestError
from ingot.langchain import ChatIngot
from recipes.vision.draw import draw, png
from recipes.vision.scenes import held_out_scene
from tests.vision.conftest import COLOUR, POCKET, image, url_of

TEXT = {"type": "text", "text": COLOUR}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(POCKET, "cpu", max_batch_size=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def chat(llm: LLM) -> ChatIngot:
    return ChatIngot(model=llm, temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def scene() -> bytes:
    """An orange square and nothing else."""
    return png(draw([held_out_scene(1)])[0])


def alone(llm: LLM, messages: list[dict[str, Any]]) -> str | None:
    return llm.chat(messages, temperature=0.0, max_new_tokens=48).text


def test_all_shapes_of_a_picture(chat: ChatIngot, scene: bytes) -> None:
    data, url = base64.b64encode(scene).decode(), url_of(scene)
    blocks: list[dict[str, Any]] = [
        {"type": "image", "base64": data, "mime_type": "image/png"},
        {"type": "image", "url": url},
        {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
    ]
    for block in blocks:
        assert chat.invoke([HumanMessage([block, TEXT])]).text.strip() == "orange"
        assert chat.get_num_tokens_from_messages([HumanMessage([block, TEXT])]) > 16
    assert chat.invoke([HumanMessage(content_blocks=[blocks[0], TEXT])]).text.strip() == "orange"  # type: ignore[list-item]


async def test_rounds_streams_and_tokens(
    chat: ChatIngot, llm: LLM, scene: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours of a user are one message; each call reads a picture once."""
    part = image(url_of(scene))
    messages: list[BaseMessage] = [
        SystemMessage("Look."),
        HumanMessage([{"type": "text", "text": "Here: "}, part, "So", "?"]),
        HumanMessage(COLOUR),
        AIMessage("orange"),
        HumanMessage("Where is it?"),
    ]
    asks = {"type": "text", "text": f"So?\n\n{COLOUR}"}
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "text", "text": "Here: "}, part, asks]},
        {"role": "assistant", "content": "orange"},
        {"role": "user", "content": "Where is it?"},
    ]
    wanted, count = alone(llm, talk), len(llm.prompt_ids(talk))
    reads: list[str] = []
    read = llm.read_image
    monkeypatch.setattr(llm, "read_image", lambda source: reads.append(source) or read(source))  # type: ignore[func-returns-value]
    whole = chat.invoke(messages)
    assert (whole.text, len(reads)) == (wanted, 1)
    assert whole.usage_metadata
    assert whole.usage_metadata["input_tokens"] == count == chat.get_num_tokens_from_messages(messages)
    reads.clear()
    *_, last = chunks = list(chat.stream(messages))
    assert "".join(chunk.text for chunk in chunks) == wanted
    assert last.usage_metadata
    assert (last.usage_metadata["input_tokens"], len(reads)) == (count, 1)
    assert "".join([chunk.text async for chunk in chat.astream(messages)]) == wanted


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "image", "url": "https://example.com/cat.png"}, "nothing is fetched.*example.com"),
        ({"type": "image", "url": "/etc/hostname"}, "no file is read"),
        ({"type": "image", "file_id": "file-1"}, "no file is read.*file_id"),
        (image("file:///etc/passwd"), "no file is read"),
        ({"type": "image", "base64": "????", "mime_type": "image/png"}, "not in base64"),
        (image(url_of(b"no picture")), "this is no picture"),
        ({"type": "audio", "base64": "AA==", "mime_type": "audio/wav"}, "text and images; seen: .*audio"),
    ],
)
def test_what_is_refused(chat: ChatIngot, block: dict[str, Any], words: str) -> None:
    messages: list[BaseMessage] = [HumanMessage("Hi"), AIMessage("Hello"), HumanMessage([block, TEXT])]
    with pytest.raises(RequestError, match=f"message 3: .*{words}"):
        chat.invoke(messages)


def test_a_picture_of_the_assistant(chat: ChatIngot, scene: bytes) -> None:
    said = AIMessage([image(url_of(scene))])
    with pytest.raises(RequestError, match="only messages of the user have pictures"):
        chat.invoke([HumanMessage("Hi"), said, HumanMessage("And?")])
