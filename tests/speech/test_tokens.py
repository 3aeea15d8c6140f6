"""Whisper's vocabularies, its special tokens and what it suppresses are those of OpenAI's implementation."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import CheckpointError, RequestError, TokenizerError
from ingot.models.speech_tokens import SpeechTokens, Task, non_speech_tokens
from ingot.text.languages import CODES, NAMES, language_code
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tokenizer.tokenizer_tiktoken import whisper_rules
from tests.speech.conftest import SIZES

OURS = {
    "eot": "end", "sot": "start", "transcribe": "transcribe", "translate": "translate", "sot_lm": "start_lm",
    "sot_prev": "previous", "no_speech": "no_speech", "no_timestamps": "no_timestamps",
    "timestamp_begin": "first_timestamp",
}  # fmt: skip


@pytest.fixture(scope="module")
def reported(golden: Path) -> Any:
    return json.loads((golden / "whisper" / "tokenizer.json").read_text())


@pytest.mark.parametrize("name", SIZES)
def test_ids_are_the_originals(name: str, reported: Any, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.vocab_size == SIZES[name]
    for case in reported[name]["texts"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids_special_parsed"]
        assert tokenizer.encode(case["text"], parse_special=False) == case["ids_all_text"]


@pytest.mark.parametrize("name", SIZES)
def test_special_tokens_are_the_originals(name: str, reported: Any, tokenizers: dict[str, Tokenizer]) -> None:
    named = SpeechTokens.of_tokenizer(tokenizers[name])
    assert named == SpeechTokens.of_vocabulary(SIZES[name])
    assert {ours: getattr(named, ours) for ours in OURS.values()} == {
        ours: reported[name][theirs] for theirs, ours in OURS.items()
    }
    assert named.prompt(None, "transcribe", timestamps=True) == reported[name]["sot_sequence"]
    assert named.multilingual == (name == "multilingual")
    for time in reported["timestamps"]:
        assert named.seconds(time[name]) == pytest.approx(time["seconds"])
        assert tokenizers[name].token_text(time[name]) == time["text"]


@pytest.mark.parametrize("name", SIZES)
def test_what_is_not_speech(name: str, reported: Any, tokenizers: dict[str, Tokenizer]) -> None:
    assert sorted(non_speech_tokens(tokenizers[name])) == reported[name]["non_speech_tokens"]


def test_prompts_of_every_vocabulary(reported: Any) -> None:
    for case in reported["sot_sequences"]:
        tokens = SpeechTokens.of_vocabulary(51766 + case["num_languages"])
        prompt = tokens.prompt(language_code(case["language"]), case["task"], timestamps=False)
        assert prompt == case["ids"]


def test_languages() -> None:
    assert len(CODES) == 100
    assert len(set(NAMES.values())) == 100
    assert language_code("English") == "en"
    assert language_code(" ZH") == "zh"
    assert language_code("haitian creole") == "ht"
    with pytest.raises(RequestError, match=r"unknown language.*klingon.*de or german"):
        language_code("klingon")
    with pytest.raises(RequestError, match=r"does not know.*yue"):
        SpeechTokens.of_vocabulary(51865).prompt("yue", "transcribe", timestamps=True)
    english = SpeechTokens.of_vocabulary(51864)
    assert english.prompt("en", "transcribe", timestamps=False) == [50257, 50362]
    wrong: list[tuple[str, Task]] = [("de", "transcribe"), ("en", "translate")]
    for language, task in wrong:
        with pytest.raises(RequestError, match="English alone"):
            english.prompt(language, task, timestamps=True)


def test_other_vocabularies_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(CheckpointError, match="special tokens are unknown"):
        SpeechTokens.of_vocabulary(50257)
    with pytest.raises(TokenizerError, match="no published Whisper"):
        whisper_rules(None)
    lacking = copy.copy(tokenizers["gpt2"])
    lacking.special_tokens = {k: v for k, v in lacking.special_tokens.items() if k != "<|transcribe|>"}
    with pytest.raises(CheckpointError, match=r"lacks.*<\|transcribe\|>"):
        SpeechTokens.of_tokenizer(lacking)
