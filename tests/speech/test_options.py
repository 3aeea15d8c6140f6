"""Options of a recording: their defaults beside the original's, what None means, and what each changes."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.llm.outputs import Answer, Output
from ingot.models.speech_tokens import SpeechTokens
from ingot.models.whisper_generation import SpeechGeneration
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.window_decoding import DecodeRequest, Vocabulary, detect_language
from ingot.text.prompt import Input
from tests.speech.scripted import FIRST, TOKENS, at, plain_vocabulary, scripted

# openai-whisper 20250625, by the original's names: parameters of ``transcribe`` in transcribe.py, and those
# fields of ``DecodingOptions`` in decoding.py that it takes.
ORIGINAL: dict[str, Any] = {
    "temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "compression_ratio_threshold": 2.4,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
    "condition_on_previous_text": True,
    "initial_prompt": None,
    "carry_initial_prompt": False,
    "word_timestamps": False,
    "prepend_punctuations": "\"'“¿([{-",
    "append_punctuations": "\"'.。,，!！?？:：”)]}、",
    "clip_timestamps": "0",
    "hallucination_silence_threshold": None,
    "task": "transcribe",
    "language": None,
    "sample_len": None,
    "best_of": None,
    "beam_size": None,
    "patience": None,
    "length_penalty": None,
    "prefix": None,
    "suppress_tokens": "-1",
    "suppress_blank": True,
    "without_timestamps": False,
    "max_initial_timestamp": 1.0,
}
RENAMED = {
    "temperature": "temperatures",
    "compression_ratio_threshold": "compression_ratio",
    "logprob_threshold": "logprob",
    "no_speech_threshold": "no_speech",
    "sample_len": "max_new_tokens",
    "suppress_tokens": "suppress",
    "without_timestamps": "timestamps",
}
# Another way to say the same: the original's value → ours.
REPHRASED: dict[str, Any] = {"clip_timestamps": (), "suppress_tokens": None, "without_timestamps": True}
# Not the original's.
OWN = {"chunked": False, "hotwords": None, "seed": 0}


@pytest.mark.parametrize("name", ORIGINAL)
def test_defaults_are_the_originals(name: str) -> None:
    ours = getattr(TranscribeOptions(), RENAMED.get(name, name))
    assert ours == REPHRASED.get(name, ORIGINAL[name])
    assert type(ours) is type(REPHRASED.get(name, ORIGINAL[name]))


def test_every_option_stands_beside_the_originals_or_is_ours() -> None:
    ours = {field.name: field.default for field in fields(TranscribeOptions)}
    assert {*ours} == {RENAMED.get(name, name) for name in ORIGINAL} | {*OWN}
    assert {name: ours[name] for name in OWN} == OWN


def asked_of(vocabulary: Vocabulary | None = None, **options: Any) -> tuple[list[int], SamplingParams]:
    """What the first window asks: its prompt, and how it is sampled."""
    _, asked = scripted([[FIRST, 5, at(1)]], 1.0, vocabulary, **options)
    assert isinstance(asked[0], DecodeRequest)
    return list(asked[0].prompt.parts[1]), asked[0].params  # type: ignore[arg-type]


def test_none_is_the_simplest_search() -> None:
    _, greedy = asked_of(beam_size=None, best_of=None, patience=None, length_penalty=None)
    assert (greedy.num_beams, greedy.n, greedy.temperature) == (SamplingParams().num_beams, 1, 0.0)
    _, drawn = asked_of(temperatures=0.2, best_of=None)
    assert (drawn.temperature, drawn.n) == (0.2, 1)
    _, beams = asked_of(beam_size=2, patience=None, length_penalty=None)
    assert beams.transcript is not None
    assert (beams.num_beams, beams.transcript.patience, beams.length_penalty) == (2, 1.0, 1.0)


def test_each_option_of_a_search_reaches_it() -> None:
    _, drawn = asked_of(temperatures=(0.4, 0.8), best_of=3, seed=17)
    assert (drawn.temperature, drawn.n, drawn.seed) == (0.4, 3, 17)
    _, beams = asked_of(beam_size=4, patience=2.0, length_penalty=0.5)
    assert beams.transcript is not None
    assert (beams.num_beams, beams.transcript.patience, beams.length_penalty) == (4, 2.0, 0.5)
    assert asked_of(max_new_tokens=7)[1].max_new_tokens == 7
    assert asked_of()[1].max_new_tokens == asked_of(max_new_tokens=500)[1].max_new_tokens == 224


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"temperatures": 0.2}, {"temperatures": (0.2,)}),
        ({"temperatures": 0}, {"temperatures": (0.0,)}),
        ({"temperatures": [0.0, 1.0]}, {"temperatures": (0.0, 1.0)}),
        ({"temperatures": np.arange(0, 1.1, 0.5)}, {"temperatures": (0.0, 0.5, 1.0)}),
        ({"temperatures": np.float32(0.5)}, {"temperatures": (0.5,)}),
        ({"beam_size": np.int64(3)}, {"beam_size": 3}),
        ({"clip_timestamps": "0,5,5,8"}, {"clip_timestamps": (0.0, 5.0, 5.0, 8.0)}),
        ({"clip_timestamps": torch.tensor([1.0, 2.0])}, {"clip_timestamps": (1.0, 2.0)}),
        ({"clip_timestamps": ""}, {"clip_timestamps": ()}),
        ({"suppress": [1, 2]}, {"suppress": (1, 2)}),
        ({"language": "German"}, {"language": "de"}),
    ],
)
def test_other_ways_to_say_it(given: dict[str, Any], plain: dict[str, Any]) -> None:
    options = TranscribeOptions(**given)
    assert options == TranscribeOptions(**plain)
    assert TranscribeOptions.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperatures": "warm"}, "temperatures is of the wrong type; seen: 'warm'"),
        ({"temperatures": True}, "temperatures is of the wrong type"),
        ({"temperatures": ()}, "temperatures is out of range"),
        ({"temperatures": (math.nan,)}, "temperatures is out of range"),
        ({"beam_size": "5"}, "beam_size is of the wrong type; seen: '5'; allowed: int | None"),
        ({"beam_size": 0}, "1 to 64, or None"),
        ({"best_of": 65}, "1 to 64, or None"),
        ({"length_penalty": math.nan}, "length_penalty is out of range"),
        ({"length_penalty": 11}, "-10 to 10, or None"),
        ({"patience": 2.0}, "patience is of a beam search"),
        ({"patience": 2.0, "beam_size": 1}, "patience is of a beam search"),
        ({"patience": math.inf, "beam_size": 2}, "patience must be positive"),
        ({"prefix": 3}, "prefix is of the wrong type"),
        ({"clip_timestamps": "0,end"}, "clip_timestamps is of the wrong type; seen: '0,end'"),
        ({"clip_timestamps": (0, 5, 4, 8)}, "seconds that never fall"),
        ({"clip_timestamps": (math.nan,)}, "seconds that never fall"),
        ({"max_initial_timestamp": -0.5}, "max_initial_timestamp is out of range"),
        ({"language": 3}, "language is of the wrong type"),
        ({"append_punctuations": None}, "append_punctuations is of the wrong type"),
        ({"hallucination_silence_threshold": 1.0}, "word_timestamps=True"),
    ],
)
def test_values_that_say_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        TranscribeOptions(**options)
    assert words in str(caught.value)
    assert caught.value.field in options


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("temperatures", (0.0, 2.0), (-0.01, 2.01, math.inf)),
        ("beam_size", (1, 64), (0, 65)),
        ("best_of", (1, 64), (0, 65)),
        ("max_new_tokens", (1, 448), (0, -1)),
        ("seed", (-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63)),
        ("length_penalty", (-10.0, 10.0), (-10.01, 10.01)),
        ("patience", (0.01, 64.0), (0.0, -1.0)),
        ("compression_ratio", (0.01, 100.0), (0.0, math.inf)),
        ("hallucination_silence_threshold", (0.01, 60.0), (0.0, math.inf)),
        ("max_initial_timestamp", (0.0, 30.0), (-0.01, math.inf)),
        ("clip_timestamps", ((0.0,), (5.0, 5.0)), ((-0.1,), (5.0, 4.9), (math.inf,))),
        ("suppress", ((-1,), (0,)), ((-2,),)),
    ],
)
def test_each_bound(name: str, inside: tuple[Any, ...], outside: tuple[Any, ...]) -> None:
    beside = {"patience": {"beam_size": 2}, "hallucination_silence_threshold": {"word_timestamps": True}}
    for value in inside:
        TranscribeOptions(**{name: value} | beside.get(name, {}))
    for value in outside:
        with pytest.raises(RequestError) as caught:
            TranscribeOptions(**{name: value} | beside.get(name, {}))
        assert caught.value.field == name


def test_patience_without_effect_is_no_error() -> None:
    assert TranscribeOptions(patience=1.0).patience == 1.0


def test_a_prefix_stands_behind_the_start_and_is_not_said_again() -> None:
    start = TOKENS.prompt("en", "transcribe", timestamps=True)
    ids, params = asked_of(prefix=" 7 8 ")
    assert ids == [*start, 7, 8]
    assert params.transcript is not None
    assert params.transcript.framed == len(start) - 1 + 2, "silence is read at the start, as without"
    found, asked = scripted([[FIRST, 5, at(30)], [FIRST, 6, at(2)]], 32.0, prefix="7 8")
    assert found.text == "56"
    prompts = [list(one.prompt.parts[1]) for one in asked]  # type: ignore[arg-type]
    assert [one[-2:] for one in prompts] == [[7, 8], [7, 8]], "of every window"
    assert prompts[1][0] == TOKENS.previous


def test_a_prefix_has_what_new_tokens_leave() -> None:
    """The original cuts it to half of the positions without ``sample_len``, where that is given."""
    words = " ".join(map(str, range(100, 130)))
    frame = len(TOKENS.prompt("en", "transcribe", timestamps=True))
    assert asked_of(prefix=words)[0][frame:] == [*range(100, 130)]
    assert asked_of(prefix=words, max_new_tokens=204)[0][frame:] == [*range(110, 130)]
    assert asked_of(prefix=words, max_new_tokens=224)[0][frame:] == [*range(100, 130)]
    longest = " ".join(["9"] * 219)
    ids, _ = asked_of(prefix=longest, initial_prompt=" ".join(["5"] * 300), timestamps=False)
    assert len(ids) == 448 - 1, "there is room for one token"
    with pytest.raises(RequestError, match=r"prefix is too long; seen: 220 tokens; allowed: at most 219"):
        asked_of(prefix=f"{longest} 9")


def rules(vocabulary: Vocabulary, **options: Any) -> Any:
    return vocabulary.rules(TranscribeOptions(**options))


def test_a_window_begins_as_late_as_it_may() -> None:
    """Without a word from the checkpoint and with one; the original takes 0 for no limit."""
    reported = SpeechGeneration.of({"max_initial_timestamp_index": 3}, 51865)
    for vocabulary, default in ((plain_vocabulary(), 50), (Vocabulary.of(TOKENS, None, 448, reported), 3)):
        found = [
            rules(vocabulary, max_initial_timestamp=seconds).last_first for seconds in (1.0, 0.5, 2, 0, None)
        ]
        assert found == [default, 25, 100, None, None]


def test_blanks_are_allowed_where_asked() -> None:
    vocabulary = plain_vocabulary(begin_suppressed=(220, TOKENS.end))
    assert rules(vocabulary).begin_suppressed == (220, TOKENS.end)
    assert rules(vocabulary, suppress_blank=False).begin_suppressed == ()


def test_models_of_english_alone_say_what_they_cannot() -> None:
    english = SpeechTokens.of_vocabulary(51864)
    assert english.prompt("en", "transcribe", timestamps=True) == [english.start]
    for language in (None, "en", "de"):
        with pytest.raises(RequestError, match=r"not translate; seen: translate.*multilingual") as caught:
            english.prompt(language, "translate", timestamps=True)
        assert caught.value.field == "task"
    with pytest.raises(RequestError, match=r"knows English alone; seen: de; allowed: en") as caught:
        english.prompt("de", "transcribe", timestamps=True)
    assert caught.value.field == "language"


def test_a_language_is_the_likeliest_of_the_first_window() -> None:
    """One token is asked for, with what is likely beside it; other tokens among these are no languages."""
    german, english, french = (TOKENS.languages[code] for code in ("de", "en", "fr"))
    window = Input(torch.zeros(80, 3000))
    asking = detect_language(plain_vocabulary(), window)
    asked = next(asking)
    assert list(asked.prompt.parts[1]) == [TOKENS.start]  # type: ignore[arg-type]
    assert (asked.params.max_new_tokens, asked.params.logprobs) == (1, 20)
    rules = asked.params.transcript
    assert rules is not None
    assert rules.detect == tuple(TOKENS.languages.values())
    likely = (
        (TOKENS.no_speech, -0.1),
        (german, math.log(0.7)),
        (7, -1.5),
        (english, math.log(0.2)),
        (french, -9.0),
    )
    reported = [TokenLogprobs(german, math.log(0.7), likely)]
    with pytest.raises(StopIteration) as ended:
        asking.send(Output([], [Answer("", [german], "length", logprobs=reported)]))
    found = ended.value.value
    assert list(found) == ["de", "en", "fr"]
    assert list(found.values()) == pytest.approx([0.7, 0.2, math.exp(-9.0)])
