"""Chat prompts against the reference programs, the choice of a format, and stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ConfigError, RequestError, TokenizerError
from ingot.text.chat.chat_format import ChatML, Vicuna, VicunaV0
from ingot.text.chat.chat_renderer import ChatFormat, load_chat_format, stop_ids_for
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.unit.chat_cases import CHATML, jinja, user


def _golden_contexts(golden: Path) -> list[dict[str, Any]]:
    cases = json.loads((golden / "qwen_chat" / "make_context.json").read_text(encoding="utf-8"))
    assert len(cases) == 12
    return cases


def _as_messages(case: dict[str, Any]) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": case["system"]}]
    for query, answer in case["history"]:
        messages += [{"role": "user", "content": query}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": case["query"]}]


def test_make_context(golden: Path, qwen1: Tokenizer, tmp_path: Path) -> None:
    """All 12 conversations of the reference: text and ids, typed special tokens and cut histories
    included.
    """
    for case in _golden_contexts(golden):
        generation = {"chat_format": "chatml", "max_window_size": case["max_window_size"]}
        chat = load_chat_format(tmp_path, generation)
        assert isinstance(chat, ChatML)
        messages = _as_messages(case)
        assert chat.prompt_text(messages, tokenizer=qwen1) == case["raw_text"], case["name"]
        assert chat.prompt_ids(messages, qwen1) == case["token_ids"], case["name"]
        plain = qwen1.encode(case["raw_text"]) == case["token_ids"]
        assert plain == case["equals_plain_encoding_of_raw_text"]


def test_chatml_without_system_uses_qwens(qwen1: Tokenizer) -> None:
    text = ChatML().prompt_text(user("Hi"))
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert ChatML().prompt_text(user("Hi"), add_generation_prompt=False).endswith("Hi<|im_end|>")


def test_chatml_on_a_tokenizer_without_its_tokens(llama: Tokenizer) -> None:
    ids = ChatML().prompt_ids(user("Hi"), llama)
    assert ids[0] == llama.bos_id
    assert ids.count(1) == 1
    assert "<|im_start|>" in llama.decode(ids)


def test_vicuna(llama: Tokenizer) -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": "Hello."}, *user("Bye")]
    text = Vicuna().prompt_text(messages)
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    )
    assert text == system + "USER: Hi ASSISTANT: Hello.</s>USER: Bye ASSISTANT:"
    assert Vicuna().prompt_ids(messages, llama) == llama.encode(text)
    assert Vicuna().prompt_ids(messages, llama).count(2) == 1
    assert Vicuna().stop_ids(llama) == (2,)
    own = Vicuna().prompt_text([{"role": "system", "content": "S."}, *user("Hi")])
    assert own == "S. USER: Hi ASSISTANT:"


def test_vicuna_v0(llama: Tokenizer) -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": "Hello."}, *user("Bye")]
    text = VicunaV0().prompt_text(messages)
    assert text.endswith("the human's questions.###Human: Hi###Assistant: Hello.###Human: Bye###Assistant:")
    assert VicunaV0().prompt_ids(messages, llama) == llama.encode(text)
    assert VicunaV0().stop_strings == ("###",)


@pytest.mark.parametrize("chat", [Vicuna(), VicunaV0(), ChatML()], ids=lambda chat: chat.name)
def test_typed_end_of_text_stays_text(chat: ChatFormat, llama: Tokenizer) -> None:
    ids = chat.prompt_ids(user("</s>a<s></s>"), llama)
    assert ids.count(1) == 1
    assert 2 not in ids
    assert "</s>a<s></s>" in llama.decode(ids)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ({"role": "user", "content": "Hi"}, "messages"),
        (["Hi"], r"messages\[0\]"),
        ([{"content": "Hi"}], r"messages\[0\].role"),
        ([{"role": "robot", "content": "Hi"}], "robot"),
        ([{"role": ["user"], "content": "Hi"}], r"messages\[0\].role"),
        (user(None), r"messages\[0\].content"),
        (user(7), r"messages\[0\].content"),
        (user(b"Hi"), r"messages\[0\].content"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
        (user([{"type": "text", "text": "a"}, {"type": "text"}]), r"content\[1\].text"),
        (user(["Hi"]), r"content\[0\]"),
    ],
)
@pytest.mark.parametrize("chat", [jinja(CHATML), ChatML(), Vicuna()], ids=["jinja", "chatml", "vicuna"])
def test_bad_messages(messages: Any, named: str, chat: ChatFormat) -> None:
    with pytest.raises(RequestError, match=named):
        chat.prompt_text(messages)


@pytest.mark.parametrize("chat", [ChatML(), Vicuna(), VicunaV0()], ids=lambda chat: chat.name)
def test_orders_that_frames_cannot_express(chat: ChatFormat) -> None:
    answer = {"role": "assistant", "content": "A"}
    system = {"role": "system", "content": "S"}
    for messages in (
        [answer],
        [*user("Q"), system],
        [*user("Q"), answer],
        [system],
        [system, answer, *user("Q")],
    ):
        with pytest.raises(RequestError):
            chat.prompt_text(messages)
    assert "A" in chat.prompt_text([*user("Q"), answer], add_generation_prompt=False)
    with pytest.raises(RequestError, match="enable_thinking"):
        chat.prompt_text(user("Q"), variables={"enable_thinking": True})


def test_order_of_sources(tmp_path: Path) -> None:
    def text() -> str:
        chat = load_chat_format(tmp_path, {"chat_format": "chatml"})
        assert chat is not None
        return chat.prompt_text(user("Hi"))

    assert text().startswith("<|im_start|>system")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert text() == "json"
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "named {{ bos_token }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "bos_token": "<b>"}))
    assert text() == "named <b>"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config"}')
    assert text() == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert text() == "file"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    for override, start in (("chatml", "<|im_start|>"), ("vicuna", "A chat"), (str(own), "own")):
        chat = load_chat_format(tmp_path, {}, override)
        assert chat is not None
        assert chat.prompt_text(user("Hi")).startswith(start)


def test_no_chat_format(tmp_path: Path) -> None:
    assert load_chat_format(tmp_path, {}) is None
    assert load_chat_format(tmp_path, {"chat_format": "raw"}) is None


def test_bad_overrides(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="vicuna-v0"):
        load_chat_format(tmp_path, {}, "alpaca")
    for window in (0, -1, "6144", True, 1.5):
        with pytest.raises(ConfigError, match="max_window_size"):
            load_chat_format(tmp_path, {"chat_format": "chatml", "max_window_size": window})


def test_stop_ids(qwen1: Tokenizer, qwen2: Tokenizer, llama: Tokenizer) -> None:
    assert stop_ids_for({"eos_token_id": 151643}, {}, qwen1, ChatML()) == (151643, 151644, 151645)
    assert stop_ids_for({"eos_token_id": [7, 5]}, {"eos_token_id": 9}, None, None) == (5, 7, 9)
    assert stop_ids_for({}, {}, llama, None) == (2,)
    assert stop_ids_for({"eos_token_id": None}, {}, None, None) == ()
    assert stop_ids_for({"eos_token_id": 5}, {}, llama, VicunaV0()) == (2, 5)
    assert stop_ids_for({"eos_token_id": 151643}, {}, qwen2, jinja(CHATML)) == (151643, 151645)
    for bad in ("2", True, [1, None], 1.0):
        with pytest.raises(ConfigError, match="eos_token_id"):
            stop_ids_for({"eos_token_id": bad}, {}, None, None)


@pytest.mark.parametrize("named", [["chatml"], {"chatml": 1}, 1, None, "chatml2"])
def test_a_chat_format_that_is_no_name_is_none(named: object, tmp_path: Path) -> None:
    assert load_chat_format(tmp_path, {"chat_format": named}) is None
