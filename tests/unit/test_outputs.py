"""An answer assembled from tokens: stop strings, and text held back until the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config.sampling_params import SamplingParams
from ingot.llm.outputs import AnswerAssembler
from ingot.runtime.executor import Update
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.runtime.scheduling.request import FinishReason
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.unit.vocabularies import load, qwen1_folder

PARAMS = SamplingParams(stop=("###",), logprobs=0)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load(qwen1_folder(tmp_path))


def update(text: bytes, reason: FinishReason | None = None) -> Update:
    """A token a byte."""
    return Update("r0", 0, tuple(text), reason, logprobs=tuple(TokenLogprobs(t, -1.0) for t in text))


def test_the_start_of_a_stop_string_is_text_where_the_answer_ends(tokenizer: Tokenizer) -> None:
    assembler = AnswerAssembler(tokenizer, PARAMS, [])
    first = assembler.add(update(b"Hi##"))
    last = assembler.add(update(b"", FinishReason.LENGTH))
    assert (first.text, last.text) == ("Hi", "##")
    assert (assembler.answer.text, assembler.answer.finish_reason) == ("Hi##", "length")


def test_half_a_character_is_emitted_at_the_end(tokenizer: Tokenizer) -> None:
    assembler = AnswerAssembler(tokenizer, PARAMS, [])
    assert assembler.add(update("é".encode()[:1])).text == ""
    assert assembler.abort().text == "\ufffd"


def test_tokens_and_log_probabilities_end_with_the_stop_string(tokenizer: Tokenizer) -> None:
    assembler = AnswerAssembler(tokenizer, PARAMS, [])
    piece = assembler.add(update(b"a###b"))
    answer = assembler.answer
    assert (answer.text, answer.finish_reason, answer.stopped_by) == ("a", "stop", "###")
    assert piece.token_ids == tuple(answer.token_ids) == tuple(b"a###")
    assert [each.token_id for each in piece.logprobs] == list(b"a###")
    assert answer.logprobs == list(piece.logprobs)


def test_an_answer_that_nobody_streams_has_its_text_when_it_ends(tokenizer: Tokenizer) -> None:
    streamed = AnswerAssembler(tokenizer, SamplingParams(logprobs=0), [])
    kept = AnswerAssembler(tokenizer, SamplingParams(logprobs=0), [])
    words = "häßlich".encode()
    for at, byte in enumerate(words):
        reason = FinishReason.LENGTH if at == len(words) - 1 else None
        piece = streamed.add(update(bytes([byte]), reason))
        kept.keep(update(bytes([byte]), reason))
        assert kept.done is (reason is not None)
    assert piece.finish_reason == "length"
    assert kept.answer == streamed.answer
    assert kept.answer.text == "häßlich"


@pytest.mark.parametrize("length", [255, 256, 257, 600])
def test_a_long_answer_that_nobody_streams_has_all_of_its_text_once(
    tokenizer: Tokenizer, length: int
) -> None:
    assembler = AnswerAssembler(tokenizer, SamplingParams(), [])
    words = bytes(97 + at % 26 for at in range(length))
    for at, byte in enumerate(words):
        assembler.keep(update(bytes([byte]), FinishReason.LENGTH if at == length - 1 else None))
        unread = len(assembler.answer.token_ids) - len(assembler.answer.text or "")
        assert unread < 256, "others' steps wait for the text of so many tokens"
    assert assembler.answer.text == words.decode()


@pytest.mark.parametrize("before", [252, 253, 254, 255, 256, 509])
def test_a_character_that_a_late_reading_cuts_is_whole(tokenizer: Tokenizer, before: int) -> None:
    """Its bytes are tokens on both sides of one that ends a reading; special tokens have no text."""
    assembler = AnswerAssembler(tokenizer, SamplingParams(), [])
    special = tokenizer.special_tokens["<|endoftext|>"]
    ids = [*b"a" * (before - 1), special, *"€".encode(), *b"b" * 9]
    for at, token in enumerate(ids):
        reason = FinishReason.LENGTH if at == len(ids) - 1 else None
        assembler.keep(Update("r0", 0, (token,), reason))
    assert assembler.answer.text == "a" * (before - 1) + "€" + "b" * 9
    assert assembler.answer.token_ids == ids


def test_many_tokens_of_one_update_have_their_text_at_once(tokenizer: Tokenizer) -> None:
    """As those of a beam, whose last bytes may be half a character."""
    assembler = AnswerAssembler(tokenizer, SamplingParams(), [])
    assembler.keep(update(b"x" * 700 + "é".encode()[:1], FinishReason.LENGTH))
    assert assembler.answer.text == "x" * 700 + "\ufffd"
    assert assembler.done


def test_a_tokenizer_that_joins_no_bytes_is_asked_for_each_token(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "joins_bytes", False)
    assembler = AnswerAssembler(tokenizer, SamplingParams(), [])
    for end in range(1, 4):
        assembler.keep(update(b"abc"[end - 1 : end]))
        assert assembler.answer.text == "abc"[:end]


def test_an_answer_that_is_aborted_has_the_text_of_its_tokens(tokenizer: Tokenizer) -> None:
    assembler = AnswerAssembler(tokenizer, SamplingParams(), [])
    assembler.keep(update("né".encode()[:2]))
    assert assembler.abort().text == assembler.answer.text == "n\ufffd"


def test_a_stop_string_ends_an_answer_that_nobody_streams(tokenizer: Tokenizer) -> None:
    assembler = AnswerAssembler(tokenizer, PARAMS, [])
    for byte in b"a###b":
        if not assembler.done:
            assembler.keep(update(bytes([byte])))
    answer = assembler.answer
    assert (answer.text, answer.stopped_by, bytes(answer.token_ids)) == ("a", "###", b"a###")
