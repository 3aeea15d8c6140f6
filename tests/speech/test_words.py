"""Words: where text is cut, what joins them, and how segments and windows move with them."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.errors import RequestError
from ingot.llm.outputs import Answer, Output
from ingot.models.speech_tokens import SpeechTokens
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.speech.hallucination import WindowTimes, is_made_up, seek_behind_words, without_hallucinations
from ingot.speech.recording_features import Transcript, transcribe_recording
from ingot.speech.segments import Segment, Word
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.window_decoding import DecodeRequest, Vocabulary
from ingot.speech.word_times import (
    ScoreRequest,
    Timed,
    agree,
    merge_punctuation,
    shorten_after_pause,
    shorten_at_sentences,
    split_words,
    typical_duration,
)
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.speech.scripted import at, plain_vocabulary, scripted

NAMES = SpeechTokens.of_vocabulary(51865)


class Spelled:
    """A tokenizer whose tokens are words and marks, numbered as they come."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def encode_parts(self, parts: list[str]) -> list[int]:
        found = re.findall(r" ?\w+|\W", "".join(parts))
        self.tokens += [one for one in dict.fromkeys(found) if one not in self.tokens]
        return [self.tokens.index(one) for one in found]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.tokens[one] for one in ids)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return plain_vocabulary(tokenizer=Spelled())


@pytest.fixture(scope="module")
def published(tokenizers: dict[str, Tokenizer]) -> Vocabulary:
    return Vocabulary.of(NAMES, tokenizers["multilingual"], 448)


def cut(vocabulary: Vocabulary, text: str, language: str) -> list[str]:
    assert vocabulary.tokenizer is not None
    tokens = vocabulary.tokenizer.encode_parts([text])
    words = split_words(vocabulary, tokens, language)
    assert [token for word in words for token in word] == tokens
    return [vocabulary.text(word) for word in words]


@pytest.mark.parametrize(
    ("text", "language", "words"),
    [
        (" Hello, world!", "en", [" Hello", ",", " world", "!"]),
        (' He said "no".', "en", [" He", " said", ' "no".']),  # a mark and no space: as the original
        (" Überraschung naïve 🎉🎉", "de", [" Überraschung", " naïve", " 🎉🎉"]),
        ("你好，世界", "zh", ["你好", "，", "世界"]),
        ("", "en", []),
    ],
)
def test_text_is_cut_into_words(published: Vocabulary, text: str, language: str, words: list[str]) -> None:
    found = cut(published, text, language)
    assert "".join(found) == text
    assert found == words


def test_half_a_character_at_the_end_is_kept(published: Vocabulary) -> None:
    assert published.tokenizer is not None
    tokens = published.tokenizer.encode_parts([" so 🎉"])[:-1]
    assert [token for word in split_words(published, tokens, "en") for token in word] == tokens


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("data", ["é🎉 é".encode(), "🎉".encode(), b"\xffa" + "🎉".encode(), b"a\xff"])
def test_bytes_of_a_character_stay_together(data: bytes) -> None:
    """Also behind a byte that is no character in the whole text either."""
    vocabulary = plain_vocabulary(tokenizer=Bytes())
    words = split_words(vocabulary, list(data), "zh")
    assert [vocabulary.text(word) for word in words] == list(data.decode("utf-8", "replace"))


def test_without_a_tokenizer_each_token_is_a_word() -> None:
    assert split_words(Vocabulary.of(NAMES, None, 448), [5, 6], "en") == [[5], [6]]


def timed(*words: tuple[str, float, float]) -> list[Timed]:
    return [Timed(text, [i], start, end, 1.0) for i, (text, start, end) in enumerate(words)]


def test_punctuation_joins_its_word_and_leaves_its_times() -> None:
    marks = timed((" (", 0, 1), (" so", 1, 2), ("!", 2, 3))
    merge_punctuation(marks, prepended="", appended="(")
    assert [word.text for word in marks] == [" (", " so", "!"], "only the marks that are given"
    words = timed(
        (' "', 0, 1), ("Yes", 1, 2), (",", 2, 2), (' "', 2, 3), (" ¿", 3, 3), (" no", 3, 4), (".", 4, 5)
    )
    merge_punctuation(words)
    assert [(word.text, word.start, word.end) for word in words if word.text] == [
        (' "Yes,', 1, 2),
        (' " ¿ no.', 3, 4),
    ]
    assert [token for word in words for token in word.tokens] == [0, 1, 2, 3, 4, 5, 6]


def test_long_words_at_the_border_of_a_sentence_are_cut() -> None:
    words = timed(
        (" One", 0, 0.3), (".", 0.3, 2.3), (" Two", 2.3, 6.0), (" more", 6.0, 6.4), (" end", 6.4, 9)
    )
    typical = typical_duration(words)
    assert typical == 0.7  # the median, 2.0, is too long
    shorten_at_sentences(words, 2 * typical)
    assert [(round(word.start, 2), round(word.end, 2)) for word in words] == [
        (0, 0.3), (0.3, 1.7), (4.6, 6.0), (6.0, 6.4), (6.4, 9),
    ]  # fmt: skip
    assert typical_duration(timed((" a", 0, 0.2), (" b", 0.2, 0.2), (" c", 0.2, 0.6))) == pytest.approx(0.3)
    assert typical_duration([]) == 0


def words_of(*times: tuple[float, float]) -> list[Word]:
    return [Word(f" w{i}", start, end, 1.0) for i, (start, end) in enumerate(times)]


@pytest.mark.parametrize(
    ("times", "cut"),
    [
        ([(10, 14), (14, 14.3)], [(13.2, 14), (14, 14.3)]),  # the first alone is long
        ([(10, 10.5), (10.5, 14)], [(12.4, 13.2), (13.2, 14)]),  # the second is: both are moved
        ([(10, 10.5), (10.5, 10.9)], [(10, 10.5), (10.5, 10.9)]),
    ],
)
def test_the_first_words_behind_a_pause(
    times: list[tuple[float, float]], cut: list[tuple[float, float]]
) -> None:
    words = words_of(*times)
    shorten_after_pause(words, typical=0.4, last_end=5.0)
    assert [(round(word.start, 2), round(word.end, 2)) for word in words] == cut
    words = words_of(*times)
    shorten_after_pause(words, typical=0.4, last_end=times[0][1] - 1.0)
    assert [(word.start, word.end) for word in words] == times, "no pause, no change"


def segment(start: float, end: float) -> Segment:
    return Segment(0, start, end, " w", [1], 0.0, -0.1, 1.0, 0.0)


def test_segments_begin_and_end_with_their_words_or_know_better() -> None:
    one, words = segment(1.0, 4.0), words_of((1.2, 2), (2, 3.8))
    agree(one, words, 0.4)
    assert (one.start, one.end) == (1.2, 3.8)
    one, words = segment(1.4, 3.4), words_of((1.0, 2), (2, 3.8))
    agree(one, words, 0.4)
    assert (one.start, one.end) == (1.0, 3.8), "within half a second words are believed"
    assert (words[0].start, words[1].end) == (1.0, 3.8)
    one, words = segment(3.0, 4.0), words_of((1.0, 3.2), (3.2, 5.0))
    agree(one, words, 0.4)
    assert (one.start, one.end) == (3.0, 4.0)
    assert (words[0].start, words[1].end) == (pytest.approx(2.8), 4.0)


class Model:
    """Answers windows with given transcripts, and scores with tokens half a second apart."""

    def __init__(self, vocabulary: Vocabulary, texts: list[list[str | float | list[int]]]) -> None:
        self.vocabulary, self.texts = vocabulary, texts
        self.asked: list[DecodeRequest | ScoreRequest] = []

    def answer(self, asked: DecodeRequest | ScoreRequest) -> Any:
        self.asked.append(asked)
        if isinstance(asked, ScoreRequest):
            return self.scores(asked)
        ids: list[int] = []
        for part in self.texts.pop(0):
            if isinstance(part, float):
                ids.append(NAMES.first_timestamp + round(part / 0.02))
            else:
                ids += part if isinstance(part, list) else self.encoded(part)
        reported = [TokenLogprobs(token, -0.1, ((NAMES.no_speech, -9.0),)) for token in ids]
        return Output([], [Answer("", ids, "stop", NAMES.end, reported, -0.1)])

    def encoded(self, text: str) -> list[int]:
        assert self.vocabulary.tokenizer is not None
        return self.vocabulary.tokenizer.encode_parts([text])

    def scores(self, asked: ScoreRequest) -> tuple[torch.Tensor, torch.Tensor]:
        ids = asked.prompt.parts[1]
        assert isinstance(ids, list)
        scores = torch.zeros(len(ids), len(asked.heads), 1500)
        for row in range(3, len(ids)):  # behind the start, language and task
            scores[row, :, 25 * (row - 3) : 25 * (row - 2)] = 9.0
        return torch.full((len(ids) - 1,), -0.5), scores


def transcribed(model: Model, seconds: float, **options: Any) -> Transcript:
    samples = 0.1 * torch.randn(int(seconds * 16000))
    wanted = TranscribeOptions(**{"language": "en", "word_timestamps": True} | options)
    asking = transcribe_recording(model.vocabulary, samples, 80, wanted, heads=[(0, 0), (1, 1)])
    try:
        asked = next(asking)
        while True:
            asked = asking.send(model.answer(asked))
    except StopIteration as ended:
        found: Transcript = ended.value
        return found


def test_words_move_segments_and_the_next_window(vocabulary: Vocabulary) -> None:
    model = Model(vocabulary, [[0.0, " Hello, you", 6.0, 6.0, " there"], [0.0, " Good", 1.0]])
    found = transcribed(model, 31.0)
    words = [
        [(w.text, w.start, w.end, round(w.probability, 3)) for w in s.words or []] for s in found.segments
    ]
    assert words[0] == [(" Hello,", 0.0, 0.5, 0.607), (" you", 1.0, 1.5, 0.607)]
    first, second = found.segments[0], found.segments[-1]
    assert first.words is not None
    assert second.words is not None
    assert (first.start, first.end) == (first.words[0].start, first.words[-1].end)
    assert first.end == pytest.approx(1.5, abs=0.1), "its words end where they are heard, not at 6 s"
    assert second.start == pytest.approx(first.end, abs=0.05), "and there the next window begins"
    assert [type(one) for one in model.asked] == [DecodeRequest, ScoreRequest] * 2


def test_an_engine_without_a_tokenizer_has_words_too() -> None:
    model = Model(Vocabulary.of(NAMES, None, 448), [[0.0, [5, 6], 6.0, 6.0, [7]], [0.0, [8], 1.0]])
    found = transcribed(model, 31.0)
    words = [word for segment in found.segments for word in segment.words or []]
    assert [word.text for word in words] == ["5", "6", "8"]
    assert [word.start for word in words] == [0.0, 0.5, 1.0], "the next window begins behind the last word"


class Paced(Model):
    """Tokens of text last so many seconds, one after another."""

    def __init__(self, texts: list[list[str | float | list[int]]], lasts: list[list[float]]) -> None:
        super().__init__(Vocabulary.of(NAMES, None, 448), texts)
        self.lasts = lasts

    def scores(self, asked: ScoreRequest) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, scores = super().scores(asked)
        begin, scores = 0, torch.zeros_like(scores)
        for row, seconds in enumerate(self.lasts.pop(0), start=3):
            end = begin + round(seconds / 0.02)
            scores[row, :, begin:end], begin = 9.0, end
        return logprobs, scores


@pytest.mark.parametrize(("lasts", "start"), [(0.4, 3.2), (1.2, 3.2), (2.4, 4.8)])
def test_a_pause_is_counted_from_the_segment_before(lasts: float, start: float) -> None:
    """In a window, and from one window to the next: the first word behind it is not long unless it is."""
    paces = [*[0.4] * 8, lasts, 0.4, 0.4]
    numbers = list(range(1, 9))
    one = Paced([[0.0, numbers, 3.2, 3.2, [9, 10, 11], 7.0]], [paces])
    segment = transcribed(one, 8.0).segments[-1]
    assert [word.start for word in segment.words or []][:1] == [start]
    assert segment.start == start
    two = Paced([[0.0, numbers, 3.2, 3.2], [0.0, [9, 10, 11], 4.0]], [paces[:8], paces[8:]])
    assert transcribed(two, 8.0).segments[-1].start == start


def test_a_closed_window_is_done_with(vocabulary: Vocabulary) -> None:
    model = Model(vocabulary, [[0.0, " One", 1.0, 1.0, " two", 2.0], [0.0, " three", 1.0]])
    found = transcribed(model, 31.0)
    assert found.text == " One two three"
    assert found.segments[-1].start == pytest.approx(30.0, abs=0.1)


def test_a_window_without_text_asks_for_no_scores(vocabulary: Vocabulary) -> None:
    model = Model(vocabulary, [[0.0]])
    found = transcribed(model, 3.0)
    assert (found.text, [one.words for one in found.segments]) == ("", [[]])
    assert len(model.asked) == 1


def test_the_pass_reads_text_alone(vocabulary: Vocabulary) -> None:
    model = Model(vocabulary, [[0.0, " One", 1.0, 1.0, " two", 2.0]])
    found = transcribed(model, 3.0, task="translate", language="zh")
    assert [word.text for one in found.segments for word in one.words or []] == [" One", " two"], "English"
    asked = model.asked[1]
    assert isinstance(asked, ScoreRequest)
    assert vocabulary.tokenizer is not None
    said = vocabulary.tokenizer.encode_parts([" One", " two"])
    start = [NAMES.start, NAMES.languages["zh"], NAMES.translate, NAMES.no_timestamps]
    assert asked.prompt.parts[1] == [*start, *said, NAMES.end]
    assert asked.below == NAMES.end


def spoken(start: float, end: float, *words: tuple[float, float, float]) -> Segment:
    found = segment(start, end)
    found.words = [Word(f" w{i}", *word) for i, word in enumerate(words)]
    return found


def fluent(start: float, count: int = 4) -> Segment:
    return spoken(
        start, start + 0.4 * count, *((start + 0.4 * i, start + 0.4 * (i + 1), 0.9) for i in range(count))
    )


def made_up(start: float) -> Segment:
    return spoken(start, start + 0.04, *((start, start + 0.01, 0.05) for _ in range(4)))


def test_text_is_judged_by_its_words() -> None:
    assert not is_made_up(fluent(1.0))
    assert is_made_up(made_up(1.0))
    assert is_made_up(spoken(0, 6, (0, 6, 0.9))), "four seconds too long"
    assert not is_made_up(spoken(0, 0, *[]))
    assert not is_made_up(None)


WINDOW = WindowTimes(30.0, 60.0, 200.0)


@pytest.mark.parametrize(
    ("segments", "kept", "seek"),
    [
        ([fluent(31), fluent(40)], 2, 60.0),
        ([made_up(35)], None, 35.0),  # the silence before it is skipped
        ([fluent(31), made_up(45), fluent(55)], 1, 45.0),  # silence on both sides
        ([fluent(31), made_up(33), fluent(55)], 3, 60.0),  # right behind what was said
        ([fluent(31), made_up(59)], 1, 59.0),  # at the window's end
        ([fluent(31), made_up(45), made_up(46)], 1, 45.0),  # the next is of its kind
    ],
)
def test_made_up_text_in_silence_goes(segments: list[Segment], kept: int | None, seek: float) -> None:
    found = without_hallucinations(segments, WINDOW, 2.0, last_end=29.0, seek=60.0)
    assert found == (None if kept is None else segments[:kept], seek)


def test_a_window_ends_behind_the_recording() -> None:
    """Of 35 s, 25 s of the second window are empty: made-up text at 34.5 s is not at its end."""
    window = WindowTimes(30.0, 35.0, 35.0)
    assert window.window_end == 60.0
    found = without_hallucinations([fluent(31), made_up(34.5)], window, 1.0, last_end=29.0, seek=35.0)
    assert len(found[0] or ()) == 2


MIDDLE, FIRST, LAST = (
    WindowTimes(30.0, 60.0, 200.0),
    WindowTimes(0.0, 30.0, 200.0),
    WindowTimes(30.0, 60.0, 60.5),
)
KEPT: tuple[int, float] = (-1, 60.0)


@pytest.mark.parametrize(
    ("window", "threshold", "segments", "last_end", "expected"),
    [
        # Silence behind it lasts to the window's end, to the next word, or not long enough.
        (MIDDLE, 5.0, [fluent(31), made_up(54.5)], 29.0, (1, 54.5)),
        (MIDDLE, 5.0, [fluent(31), made_up(55.5)], 29.0, KEPT),
        (MIDDLE, 5.0, [fluent(31), made_up(40), fluent(46)], 29.0, (1, 40.0)),
        (MIDDLE, 5.0, [fluent(31), made_up(40), fluent(44)], 29.0, KEPT),
        (MIDDLE, 5.0, [fluent(31), made_up(40), segment(42, 43), fluent(46)], 29.0, (1, 40.0)),
        (MIDDLE, 5.0, [fluent(31), made_up(40), spoken(44, 47, (46, 47, 0.9))], 29.0, (1, 40.0)),
        # It is at the window's end.
        (MIDDLE, 5.0, [fluent(31), made_up(57.5)], 29.0, KEPT),
        (MIDDLE, 5.0, [fluent(31), made_up(58.5)], 29.0, (1, 58.5)),
        (LAST, 5.0, [fluent(31), made_up(58.5)], 29.0, (1, 60.5)),
        # Silence before it: from the words of the window before, or of the segment before.
        (MIDDLE, 5.0, [made_up(33)], 27.5, (0, 33.0)),
        (MIDDLE, 5.0, [made_up(33)], 28.5, KEPT),
        (MIDDLE, 5.0, [fluent(31), fluent(36), made_up(42)], 29.0, KEPT),
        # It is at the beginning of the window, or of the recording.
        (MIDDLE, 5.0, [made_up(31.5)], 30.0, (0, 31.5)),
        (MIDDLE, 5.0, [made_up(30.5)], 30.0, (0, 31.0)),
        (MIDDLE, 3.0, [made_up(32.5)], 30.0, KEPT),
        (FIRST, 3.0, [made_up(2.5)], 0.0, (0, 2.5)),
    ],
)
def test_each_reason_to_drop_made_up_text(
    window: WindowTimes,
    threshold: float,
    segments: list[Segment],
    last_end: float,
    expected: tuple[int, float],
) -> None:
    """One reason before it and one behind it; beside most of them what is just not enough."""
    count, seek = expected
    kept, onwards = without_hallucinations(segments, window, threshold, last_end, seek=60.0)
    assert kept == (segments if expected is KEPT else segments[:count])
    assert onwards == seek


@pytest.mark.parametrize(("last_end", "seek"), [(57.0, 57.0), (58.5, 60.0)])
def test_silence_behind_the_last_word_is_transcribed_again(last_end: float, seek: float) -> None:
    assert seek_behind_words(MIDDLE, last_end, 2.0) == seek


def test_the_silence_behind_a_recording_counts() -> None:
    assert seek_behind_words(WindowTimes(30.0, 35.0, 35.0), 34.5, 2.0) == 34.5


def test_a_window_that_is_transcribed_again_is_transcribed_as_before(vocabulary: Vocabulary) -> None:
    """Behind the silence it reads what it read: the original does not count it as a window."""

    class Doubted(Model):
        def scores(self, asked: ScoreRequest) -> tuple[torch.Tensor, torch.Tensor]:
            logprobs, scores = super().scores(asked)
            first = len(self.texts) == 1
            return (logprobs - 5, scores.roll(200, -1)) if first else (logprobs, scores)

    model = Doubted(vocabulary, [[4.0, " um", 5.0], [0.0, " One two", 2.0]])
    options = {"condition_on_previous_text": False, "initial_prompt": "Names"}
    assert transcribed(model, 20.0, hallucination_silence_threshold=1.0, **options).text == " One two"
    first, second = (asked.prompt.parts[1] for asked in model.asked if isinstance(asked, DecodeRequest))
    assert first == second
    assert isinstance(first, list)
    assert first[0] == NAMES.previous


def test_a_recording_that_ends_in_made_up_text_is_done_with() -> None:
    window = WindowTimes(30.0, 50.0, 50.0)
    found = without_hallucinations([fluent(31), made_up(49)], window, 2.0, last_end=29.0, seek=50.0)
    assert found[1] == 50.0


def test_windows_skip_silence_before_made_up_text(vocabulary: Vocabulary) -> None:
    model = Model(vocabulary, [[0.0, " One two three four", 3.0], [0.0, " five", 1.0]])
    found = transcribed(model, 31.0, hallucination_silence_threshold=1.0)
    assert found.text == " One two three four five"
    with pytest.raises(RequestError, match="word_timestamps=True"):
        TranscribeOptions(hallucination_silence_threshold=1.0)


@pytest.mark.parametrize(
    ("task", "words"), [("translate", [" Only", " you"]), ("transcribe", [" On", "ly", " you"])]
)
def test_a_translation_has_the_words_of_english(task: str, words: list[str]) -> None:
    """Whatever is spoken: Chinese is written without spaces, and what it says in English is not."""
    texts = {5: " On", 6: "ly", 7: " you"}
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "".join(texts[i] for i in ids))
    vocabulary = replace(plain_vocabulary(), tokenizer=tokenizer)
    said = [[at(0.0), 5, 6, 7, at(2.0)]]
    options: Any = {"language": "zh", "task": task, "word_timestamps": True}
    found, _ = scripted(said, 2.0, vocabulary, **options)
    assert [word.text for segment in found.segments for word in segment.words or ()] == words
