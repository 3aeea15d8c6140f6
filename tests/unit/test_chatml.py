"""ChatML and NFC with vocabularies that the tests make: where text is cut, and what a window keeps."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers

from ingot.text.chat.chat_format import ChatML
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.unit.chat_cases import user
from tests.unit.vocabularies import load, qwen1_folder

MERGES = (b"\n\n", b"us", b"er", b"user")
TURNS = [*user("One"), {"role": "assistant", "content": "Uno"}, *user("Two")]


@pytest.fixture
def qwen1(tmp_path: Path) -> Tokenizer:
    """Single bytes, and merges across the places where the reference cuts."""
    return load(qwen1_folder(tmp_path, MERGES))


@pytest.fixture
def qwen2(tmp_path: Path) -> Tokenizer:
    """Qwen2's layout, with a vocabulary of single bytes."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    (tmp_path / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    return load(tmp_path)


def test_role_line_break_and_content_are_encoded_separately(qwen1: Tokenizer) -> None:
    """A line break at the start of a message does not join the frame's own, as in the reference."""
    start, end = (qwen1.special_tokens[f"<|im_{name}|>"] for name in ("start", "end"))
    break_, two = 10, 256
    assert qwen1.encode("user\n\nHi") == [259, two, *b"Hi"]
    frame = [break_, start, 259, break_, break_, *b"Hi", end, break_, start, *b"assistant", break_]
    ids = ChatML().prompt_ids(user("\nHi"), qwen1)
    assert ids[-len(frame) :] == frame
    assert two not in ids


def test_a_history_of_exactly_the_window_does_not_fit(qwen1: Tokenizer) -> None:
    """System message and old turns count, the question does not."""
    question = [*user("Now, at length?")]
    whole = ChatML(None).prompt_ids([*TURNS[:2], *question], qwen1)
    alone = ChatML(None).prompt_ids(question, qwen1)
    system = qwen1.encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>")
    used = len(system) + len(whole) - len(alone)
    assert ChatML(used).prompt_ids([*TURNS[:2], *question], qwen1) == alone
    assert ChatML(used + 1).prompt_ids([*TURNS[:2], *question], qwen1) == whole


def test_the_oldest_turns_go_first(qwen1: Tokenizer) -> None:
    messages = [*TURNS[:2], *user("Four"), {"role": "assistant", "content": "Quattro"}, *user("?")]
    newer = ChatML(None).prompt_ids(messages[2:], qwen1)
    question = ChatML(None).prompt_ids(messages[4:], qwen1)
    whole = ChatML(None).prompt_ids(messages, qwen1)
    system = len(qwen1.encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>"))
    kept = {window: ChatML(window).prompt_ids(messages, qwen1) for window in range(1, system + len(whole))}
    assert kept[system + len(newer) - len(question)] == question
    assert kept[system + len(newer) - len(question) + 1] == newer
    assert kept[system + len(whole) - len(question) + 1] == whole
    assert {len(ids) for ids in kept.values()} == {len(question), len(newer), len(whole)}


@pytest.mark.parametrize("kind", ["qwen1", "qwen2"])
def test_qwen_composes_what_is_decomposed(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    decomposed = "Cafe\u0301 \u1112\u1161\u11ab A\u030a"
    composed = unicodedata.normalize("NFC", decomposed)
    assert len(composed) < len(decomposed)
    for parse_special in (True, False):
        ids = tokenizer.encode(decomposed, parse_special=parse_special)
        assert ids == tokenizer.encode(composed, parse_special=parse_special)
        assert tokenizer.decode(ids) == composed
    assert ChatML().prompt_ids(user(decomposed), tokenizer) == ChatML().prompt_ids(user(composed), tokenizer)


def test_special_tokens_are_looked_for_in_what_was_composed(qwen1: Tokenizer) -> None:
    """A combining stroke takes the last sign of one, as in the reference."""
    assert qwen1.encode("<|im_end|>\u0338") == list("<|im_end|\u226f".encode())
