"""The prompts of MiniGPT-4: what stands around pictures, what stays text, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.text.chat.chat_pictures import PICTURE_FORMATS
from ingot.text.chat.chat_renderer import load_chat_format
from ingot.text.prompt import Input
from ingot.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

VICUNA, LLAMA2 = PICTURE_FORMATS["minigpt4"], PICTURE_FORMATS["minigpt4-llama2"]
PICTURE, OTHER = Input([0.0]), Input([1.0])
POCKET = Path(__file__).parents[2] / "models/pocket-vision/llama"
START = (
    "Give the following image: <Img>ImageContent</Img>. You will be able to see the image once I provide it "
    "to you. Please answer my questions."
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(POCKET)
    assert found is not None
    return found


def shown(picture: Input) -> dict[str, Any]:
    return {"type": "input", "input": picture}


def user(*parts: str | Input) -> dict[str, Any]:
    made = [{"type": "text", "text": part} if isinstance(part, str) else shown(part) for part in parts]
    return {"role": "user", "content": made}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user(PICTURE, "Hi?")], f"{START}###Human: <Img><ImageHere></Img> Hi?###Assistant: "),
        ([user("Hi?", PICTURE)], f"{START}###Human: Hi? <Img><ImageHere></Img>###Assistant: "),
        ([user(PICTURE)], f"{START}###Human: <Img><ImageHere></Img>###Assistant: "),
        ([user("Hi?")], f"{START}###Human: Hi?###Assistant: "),
        (
            [user(PICTURE, OTHER, "Same?")],
            f"{START}###Human: <Img><ImageHere></Img> <Img><ImageHere></Img> Same?###Assistant: ",
        ),
        (
            [user(PICTURE, "A?"), answer("b"), user("C?")],
            f"{START}###Human: <Img><ImageHere></Img> A?###Assistant: b###Human: C?###Assistant: ",
        ),
        ([{"role": "system", "content": "Be brief."}, user("Hi")], "Be brief.###Human: Hi###Assistant: "),
    ],
)
def test_frame(messages: list[dict[str, Any]], expected: str) -> None:
    assert VICUNA.prompt_text(messages) == expected


def test_frame_of_the_llama_2_variant() -> None:
    talk = [user(PICTURE, "A?"), answer("b"), user("C?")]
    text = f"{START}<s>[INST] <Img><ImageHere></Img> A? [/INST] b<s>[INST] C? [/INST] "
    assert LLAMA2.prompt_text(talk) == text
    assert (LLAMA2.stop_strings, VICUNA.stop_strings) == ((), ("###",))


def test_pieces_join_to_the_prompt(tokenizer: Tokenizer) -> None:
    pieces = VICUNA.prompt_pieces([user("A", PICTURE, "b", OTHER)], tokenizer)
    kinds = [piece if isinstance(piece, Input) else "ids" for piece in pieces]
    assert kinds == ["ids", "ids", PICTURE, "ids", OTHER, "ids"]
    start, before, _, between, _, after = pieces
    assert start == [tokenizer.bos_id]
    texts = (f"{START}###Human: A <Img>", "</Img> b <Img>", "</Img>###Assistant: ")
    assert [before, between, after] == [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    assert before != between


def test_what_a_user_types_stays_text(tokenizer: Tokenizer) -> None:
    typed = "<ImageHere> <s></s> <Img>"
    pieces = LLAMA2.prompt_pieces([user(PICTURE, typed)], tokenizer)
    assert tokenizer.bos_id is not None
    ids = [i for piece in pieces if not isinstance(piece, Input) for i in piece]
    assert sum(isinstance(piece, Input) for piece in pieces) == 1
    assert ids.count(tokenizer.bos_id) == 2  # at the start, and the frame's own
    assert typed in LLAMA2.prompt_text([user(PICTURE, typed)])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [user("A"), {"role": "assistant", "content": [shown(PICTURE)]}, user("B")],
            "only messages of the user",
        ),
        ([{"role": "system", "content": [shown(PICTURE)]}, user("B")], "only messages of the user"),
        ([answer("b")], "must be the user's"),
        ([user("A"), answer("b")], "last message must be the user's"),
        (
            [{"role": "user", "content": [{"type": "video"}]}],
            r"messages\[0\].content\[0\] is not a text part",
        ),
        (
            [{"role": "user", "content": [shown(PICTURE), {"type": "video"}]}],
            r"content\[1\] is not a text part",
        ),
        ([{"role": "user", "content": [{"type": "input", "input": 3}]}], "is not a text part"),
        ([], "non-empty list"),
    ],
)
def test_what_is_refused(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        VICUNA.prompt_text(messages)


def test_ids_alone_have_no_picture(tokenizer: Tokenizer) -> None:
    assert VICUNA.prompt_ids([user("Hi")], tokenizer)[0] == tokenizer.bos_id
    with pytest.raises(RequestError, match="only text is taken here"):
        VICUNA.prompt_ids([user(PICTURE, "Hi")], tokenizer)
    with pytest.raises(RequestError, match="no template variables"):
        VICUNA.prompt_ids([user("Hi")], tokenizer, variables={"thinking": True})


def test_the_checkpoint_names_it(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    found = load_chat_format(tmp_path, {"chat_format": "minigpt4-llama2"})
    assert found is LLAMA2 or (found is not None and found.name == "minigpt4-llama2")
    own = load_chat_format(tmp_path, {"chat_format": "minigpt4"}, "vicuna")
    assert own is not None
    assert own.name == "vicuna"


@pytest.mark.parametrize("number", [0, 1])
def test_ids_are_the_original_s(golden: Path, number: int) -> None:
    folder = golden / "minigpt4"
    rounds = json.loads((folder / "conversation.json").read_text())["rounds"]
    talk = [user(PICTURE, rounds[0]["question"])]
    if number:
        talk += [answer(rounds[0]["answer_kept_in_conversation"]), user(rounds[1]["question"])]
    assert VICUNA.prompt_text(talk) == rounds[number]["prompt"]
    tokenizer = load_tokenizer(folder / "weight/llama")
    assert tokenizer is not None
    start, before, picture, after = VICUNA.prompt_pieces(talk, tokenizer)
    with np.load(folder / "conversation.npz") as file:
        expected = {key: file[key].tolist() for key in file if key.endswith("_ids")}
    assert isinstance(before, list)
    assert isinstance(start, list)
    assert (start + before, picture, after) == (
        expected[f"r{number}_before_ids"],
        PICTURE,
        expected[f"r{number}_after_ids"],
    )
