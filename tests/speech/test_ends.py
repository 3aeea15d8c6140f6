"""Clips and ends: what is heard, and that no time is behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.errors import EngineError
from ingot.speech.recording_features import Transcript
from ingot.speech.segments import Segment, Word, end_at
from ingot.speech.transcriber import Transcriber
from tests.speech.scripted import FIRST, TOKENS, at, scripted
from tests.speech.test_huggingface import noise


def times(found: Transcript) -> list[float]:
    return [
        time
        for one in found.segments
        for part in (one, *(one.words or ()))
        for time in (part.start, part.end)
    ]


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        [at(0.0), 5, 6, at(28.38)],
        [at(0.0), 5, at(9.0), at(9.0), 6, at(28.38)],  # begins behind the end, too
        [at(0.0), 5, at(2.0), at(2.0), 6, at(2.5), at(2.5), 7, at(28.38)],
    ],
)
def test_nothing_ends_behind_the_recording(said: list[int], words: bool) -> None:
    found, _ = scripted([said], 1.0, spacing=8, word_timestamps=words)
    assert found.text
    assert max(times(found)) <= found.duration == 1.0
    assert found.segments[0].end == 1.0 or words
    tokens = [token for one in found.segments for token in one.tokens if token < FIRST]
    assert tokens == [token for token in said if token < FIRST], "no text is lost"


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ([at(0.0), 5, at(2.0), at(1.0), 6, at(3.0)], "1.00 s after 2.00 s, in the window at 0.00 s"),
        ([at(2.0), 5, at(1.98)], "1.98 s after 2.00 s, in the window at 0.00 s"),
    ],
)
def test_times_that_cross_are_an_error(said: list[int], seen: str) -> None:
    with pytest.raises(EngineError, match="timestamps of a transcript cross") as raised:
        scripted([said], 4.0)
    assert raised.value.seen == seen


def test_times_of_a_later_window_are_those_of_the_recording() -> None:
    with pytest.raises(EngineError) as raised:
        scripted([[at(0.0), 5, at(30.0)], [at(2.0), 5, at(1.0)]], 40.0)
    assert raised.value.seen == "31.00 s after 32.00 s, in the window at 30.00 s"


def test_equal_times_do_not_cross() -> None:
    found, _ = scripted([[at(0.0), 5, at(2.0), at(2.0), 6, at(2.0)]], 2.0)
    assert found.text.split() == ["5"]  # a segment without length is empty


def test_a_window_without_times_ends_with_the_recording() -> None:
    found, _ = scripted([[5, 6, 7]], 1.0)
    assert times(found) == [0.0, 1.0]


def test_a_window_that_names_its_begin_alone_ends_with_the_recording() -> None:
    found, _ = scripted([[at(0.0), 5, 6, 7]], 4.0)
    assert (found.text, times(found)) == ("5 6 7", [0.0, 4.0])


def test_the_original_s_decisions_stay() -> None:
    """Only what is told is cut: where windows begin and which text stays is as in the original."""
    first, second = [at(0.0), 5, at(20.0), at(20.0), 6], [at(0.0), 7, at(29.0)]
    found, _ = scripted([first, second], 31.0)
    assert [(one.start, one.end, one.seek) for one in found.segments] == [(0.0, 20.0, 0), (20.0, 31.0, 2000)]


def test_a_clip_s_end_is_an_end() -> None:
    windows = [[at(0.0), 5, at(20.0)], [at(0.0), 6, at(20.0)]]
    found, _ = scripted(windows, 40.0, clip_timestamps=(2.0, 5.0, 30.0))
    assert [(one.start, one.end) for one in found.segments] == [(2.0, 5.0), (30.0, 40.0)]


def test_words_are_cut_with_their_segment() -> None:
    words = [Word(" a", 0.5, 2.0, 1), Word(" b", 2, 3, 1)]
    one = Segment(0, 0.5, 3.0, " a b", [1], 0.0, -0.1, 1.0, 0.0, words)
    end_at(one, 1.25)
    assert (one.start, one.end) == (0.5, 1.25)
    assert [(word.start, word.end) for word in words] == [(0.5, 1.25), (1.25, 1.25)]
    end_at(one, 9.0)
    assert one.end == 1.25


@pytest.mark.parametrize(
    ("clips", "transcribed"),
    [
        ((0, 5, 5, 8), [(0.0, 5.0), (5.0, 8.0)]),  # touching
        ((0, 5, 5, 5, 6), [(0.0, 5.0), (6.0, 10.0)]),  # one of no length
        ((3, 100), [(3.0, 10.0)]),  # beyond the file
        ((20, 30), []),
        ((0, 5, 20), [(0.0, 5.0)]),
        ("0", [(0.0, 10.0)]),
        ((), [(0.0, 10.0)]),
    ],
)
def test_clips(clips: Any, transcribed: list[tuple[float, float]]) -> None:
    said = [[at(0.0), 5, at(30.0)]] * len(transcribed)
    found, asked = scripted(said, 10.0, clip_timestamps=clips)
    assert [(one.start, one.end) for one in found.segments] == transcribed
    assert len(asked) == len(transcribed)


def test_clips_that_touch_are_chunks_too(whisper: Path) -> None:
    transcriber = Transcriber(whisper, "cpu", max_batch_size=4)
    options: dict[str, Any] = {"language": "en", "temperatures": 0.0, "max_new_tokens": 4, "no_speech": None}
    clips = (0.0, 1.0, 1.0, 1.0, 1.0, 2.0)
    found = transcriber(noise(2.0), clip_timestamps=clips, chunked=True, **options)
    assert found.segments
    assert max(times(found)) <= 2.0


@pytest.mark.parametrize("word_timestamps", [False, True])
@pytest.mark.parametrize(
    "nothing", [[at(1.0), 5, at(1.0)], [at(0.0), at(1.0)]], ids=["it takes no time", "it has no text"]
)
def test_a_segment_that_says_nothing_is_empty_and_not_read(nothing: list[int], word_timestamps: bool) -> None:
    """Text and tokens of it go; its place stays. With words its time is that of its words."""
    said = [at(1.0), 6, at(30.0)]
    windows = [[*nothing, *said], [at(0.0), 7, at(2.0)]]
    found, asked = scripted(windows, seconds=32.0, word_timestamps=word_timestamps)
    is_empty = not word_timestamps or 5 not in nothing
    *before, second, _ = found.segments
    for first in before:
        assert (first.text, first.tokens) == (("", []) if is_empty else ("5", nothing))
        assert (first.words is None) == (not word_timestamps)
        assert bool(first.words) == (not is_empty)
    assert (second.text, second.tokens) == ("6", said)
    ids = list(asked[-1 - word_timestamps].prompt.parts[1])  # type: ignore[arg-type]
    read = [token for one in (*before, second) for token in one.tokens]
    assert ids[: ids.index(TOKENS.start)] == [TOKENS.previous, *read]
