"""What generation_config.json says of transcripts counts before the original's own lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import build
from ingot.errors import CheckpointError, RequestError
from ingot.models.speech_tokens import SpeechTokens, non_speech_tokens
from ingot.models.whisper_generation import SpeechGeneration
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.transcriber import Transcriber
from ingot.speech.window_decoding import Vocabulary
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.encoders.speech import write_speech

VOCAB = 51865


def vocabulary(tokenizer: Tokenizer | None, **generation: Any) -> Vocabulary:
    reported = SpeechGeneration.of(generation, VOCAB)
    return Vocabulary.of(SpeechTokens.of_vocabulary(VOCAB), tokenizer, 448, reported)


def test_without_a_word_they_are_the_originals(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["multilingual"]
    names = ("suppress_tokens", "begin_suppress_tokens", "lang_to_id", "is_multilingual")
    for found in (vocabulary(tokenizer), vocabulary(tokenizer, **dict.fromkeys(names))):
        assert found.suppressed == tuple(sorted(non_speech_tokens(tokenizer)))
        assert found.begin_suppressed == (220, 50257)
        assert found.last_first == 50
        assert found.tokens == SpeechTokens.of_vocabulary(VOCAB)
    assert vocabulary(None).suppressed == ()
    assert vocabulary(None, suppress_tokens=[5, VOCAB]).suppressed == (5,), "the model has no other"
    assert vocabulary(None).begin_suppressed == (50257,)


def test_the_file_stands_before_the_tokenizer(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["multilingual"]
    found = vocabulary(
        tokenizer,
        suppress_tokens=[5, 7],
        begin_suppress_tokens=[],
        max_initial_timestamp_index=3,
        lang_to_id={"<|de|>": 50261},
        is_multilingual=True,
    )
    assert (found.suppressed, found.begin_suppressed, found.last_first) == ((5, 7), (), 3)
    assert found.tokens.prompt("de", "transcribe", timestamps=True) == [50258, 50261, 50359]
    with pytest.raises(RequestError, match=r"does not know.*fr"):
        found.tokens.prompt("fr", "transcribe", timestamps=True)
    rules = found.rules(TranscribeOptions())
    assert {5, 7} <= {*rules.suppressed}
    assert rules.last_first == 3
    assert found.tokens.start in rules.suppressed, "what frames a transcript is never part of it"
    english = vocabulary(tokenizer, is_multilingual=False)
    assert english.tokens.prompt(None, "transcribe", timestamps=True) == [50258]


def test_a_request_stands_before_the_file(tokenizers: dict[str, Tokenizer]) -> None:
    found = vocabulary(tokenizers["multilingual"], suppress_tokens=[5, 7])
    rules = found.rules(TranscribeOptions(suppress=(9,)))
    assert 9 in rules.suppressed
    assert not {5, 7} & {*rules.suppressed}


BAD: dict[str, Any] = {
    "suppress_tokens": [[-1], "5", [True], [1.5], {"5": 1}],
    "begin_suppress_tokens": [[2**40], 220, [None]],
    "max_initial_timestamp_index": [-1, "50", True],
    "lang_to_id": [[50259], {"en": 50259}, {"<|en|>": VOCAB}],
    "is_multilingual": ["yes", 1],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    write_speech(folder, 1, vocab_size=VOCAB, num_mel_bins=80, max_source_positions=1500, eos_token_id=50257)
    return folder


@pytest.mark.parametrize("key", BAD)
def test_other_values_are_refused_when_an_engine_is_built(checkpoint: Path, key: str, tmp_path: Path) -> None:
    for value in BAD[key]:
        (checkpoint / "generation_config.json").write_text(json.dumps({key: value}))
        with pytest.raises(CheckpointError, match=rf"{key} in generation_config\.json is not valid"):
            build(checkpoint, tmp_path / "engine", device="cpu", proof=False)


def test_an_engine_obeys_its_file(checkpoint: Path, tmp_path: Path) -> None:
    """By the tokens of one window, of which the first and the likeliest others are suppressed in turn."""
    features = torch.randn(80, 3000, generator=torch.Generator().manual_seed(2))

    def said(**generation: Any) -> list[int]:
        (checkpoint / "generation_config.json").write_text(json.dumps(generation))
        engine = build(checkpoint, tmp_path / "engine", device="cpu", proof=False, force=True)
        t = Transcriber(engine, "cpu", max_batch_size=1)
        return t.decode(features, language="en", timestamps=False, temperatures=(0.0,)).tokens

    usual = said()
    assert len(usual) > 3
    without = said(suppress_tokens=sorted({*usual}))
    assert without
    assert not {*usual} & {*without}
    begins = said(begin_suppress_tokens=[usual[0]])
    assert begins[0] != usual[0]
