"""Every format, to the character; words make lines of subtitles."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingot.errors import RequestError
from ingot.speech.recording_features import Transcript
from ingot.speech.segments import Segment, Word
from ingot.speech.subtitles import SubtitleLayout, cues
from ingot.speech.transcript_writers import WRITERS, clock, written


def segment(start: float, end: float, text: str, words: list[Word] | None = None) -> Segment:
    return Segment(0, start, end, text, [1], 0.0, -0.1, 1.0, 0.01, words)


FOUND = Transcript(
    [segment(0.0, 1.5, " Hello\tthere."), segment(1.5, 1.5, ""), segment(3599.999, 3661.0, " a --> b")],
    "en",
    0.9,
)


def test_text_and_tables() -> None:
    assert FOUND.text == " Hello\tthere. a --> b"
    assert WRITERS["txt"](FOUND) == "Hello\tthere.\na --> b\n"
    assert WRITERS["tsv"](FOUND) == "start\tend\ttext\n0\t1500\tHello there.\n3599999\t3661000\ta --> b\n"
    reported = json.loads(WRITERS["json"](FOUND))
    assert reported["text"] == FOUND.text
    assert reported["language"] == "en"
    assert [one["end"] for one in reported["segments"]] == [1.5, 1.5, 3661.0]


def test_subtitles() -> None:
    assert WRITERS["srt"](FOUND) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello\tthere.\n\n2\n00:59:59,999 --> 01:01:01,000\na -> b\n"
    )
    assert WRITERS["vtt"](FOUND) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello\tthere.\n\n00:59:59.999 --> 01:01:01.000\na -> b\n"
    )
    empty = Transcript()
    assert [write(empty) for write in WRITERS.values()][:4] == ["", "", "WEBVTT\n", "start\tend\ttext\n"]


@pytest.mark.parametrize(
    ("seconds", "reported"),
    [(0, "00:00:00,000"), (59.9996, "00:01:00,000"), (360_000, "100:00:00,000"), (-1, "00:00:00,000")],
)
def test_clocks(seconds: float, reported: str) -> None:
    assert clock(seconds, ",") == reported


def test_milliseconds_are_rounded() -> None:
    found = Transcript([segment(0.2896, 1.9999, " a")])
    assert WRITERS["tsv"](found) == "start\tend\ttext\n290\t2000\ta\n"
    assert "00:00:00,290 --> 00:00:02,000" in WRITERS["srt"](found)


def test_words_of_json_have_the_originals_names() -> None:
    words = [Word(" Hello", 0.0, 0.5, 0.9), Word(" you.", 0.5, 1.0, 0.8)]
    reported = json.loads(
        WRITERS["json"](Transcript([segment(0, 1, " Hello you.", words), segment(1, 2, " a")]))
    )
    assert reported["segments"][0]["words"] == [
        {"word": " Hello", "start": 0.0, "end": 0.5, "probability": 0.9},
        {"word": " you.", "start": 0.5, "end": 1.0, "probability": 0.8},
    ]
    assert reported["segments"][1]["words"] is None


def spoken(*texts: str, start: float = 0.0, step: float = 0.5) -> Segment:
    """A segment of words, one each half second."""
    words = [Word(f" {text}", start + step * i, start + step * (i + 1), 1.0) for i, text in enumerate(texts)]
    return segment(words[0].start, words[-1].end, "".join(word.text for word in words), words)


def shown(*segments: Segment, **layout: Any) -> list[tuple[float, float, str]]:
    return [tuple(cue) for cue in cues(Transcript(list(segments)), SubtitleLayout(**layout))]


ONE, TWO = spoken("Alpha", "beta", "gamma"), spoken("delta", "epsilon", start=2.0)


def test_a_segment_is_a_subtitle() -> None:
    assert SubtitleLayout() == SubtitleLayout(None, None, None, False), "the original's defaults"
    assert shown(ONE, TWO) == [(0.0, 1.5, "Alpha beta gamma"), (2.0, 3.0, "delta epsilon")]
    late = spoken("a", "b", step=5.0)
    assert shown(late) == [(0.0, 10.0, "a b")], "a pause breaks nothing"


@pytest.mark.parametrize(
    ("layout", "texts"),
    [
        ({"max_line_width": 10}, ["Alpha beta\ngamma", "delta\nepsilon"]),  # 10 characters fit
        ({"max_line_width": 9}, ["Alpha\nbeta\ngamma", "delta\nepsilon"]),
        ({"max_line_width": 10, "max_line_count": 1}, ["Alpha beta", "gamma", "delta", "epsilon"]),
        ({"max_line_width": 12, "max_line_count": 2}, ["Alpha beta\ngamma delta", "epsilon"]),
        ({"max_line_width": 5, "max_line_count": 2}, ["Alpha\nbeta", "gamma\ndelta", "epsilon"]),
        ({"max_line_count": 1}, ["Alpha beta gamma", "delta epsilon"]),  # without a width: as without
        ({"max_words_per_line": 2}, ["Alpha beta", "gamma", "delta epsilon"]),
        ({"max_words_per_line": 1}, ["Alpha", "beta", "gamma", "delta", "epsilon"]),
        ({"max_line_width": 5, "max_words_per_line": 2}, ["Alpha\nbeta", "gamma", "delta\nepsilon"]),
        (
            {"max_line_width": 12, "max_line_count": 2, "max_words_per_line": 1},
            ["Alpha beta\ngamma delta", "epsilon"],
        ),
    ],
)
def test_lines(layout: dict[str, int], texts: list[str]) -> None:
    """As openai-whisper 20250625 breaks them."""
    found = shown(ONE, TWO, **layout)
    assert [text for *_, text in found] == texts
    assert (found[0][0], found[-1][1]) == (0.0, 3.0)


@pytest.mark.parametrize(("length", "lines"), [(42, 1), (43, 2)])
def test_a_line_of_just_its_width_does_not_break(length: int, lines: int) -> None:
    (cue,) = shown(spoken("a" * (length - 3), "bc"), max_line_width=42)
    assert len(cue[2].split("\n")) == lines


@pytest.mark.parametrize(("pause", "texts"), [(3.0, ["a b"]), (3.01, ["a", "b"])])
def test_a_pause_ends_a_subtitle(pause: float, texts: list[str]) -> None:
    """From the beginning of a word to that of the next, as in the original."""
    words = [Word(" a", 1.0, 1.2, 1.0), Word(" b", 1.0 + pause, 5.0, 1.0)]
    found = shown(segment(1, 5, " a b", words), max_line_width=42, max_line_count=2)
    assert [text for *_, text in found] == texts


def test_each_word_is_underlined_in_turn() -> None:
    words = [Word(" One,", 0.0, 0.5, 1.0), Word(" two", 0.7, 1.0, 1.0), Word(" three", 1.0, 1.4, 1.0)]
    assert shown(segment(0, 1.4, "", words), highlight_words=True, max_line_width=9) == [
        (0.0, 0.5, "<u>One,</u> two\nthree"),
        (0.5, 0.7, "One, two\nthree"),
        (0.7, 1.0, "One, <u>two</u>\nthree"),
        (1.0, 1.4, "One, two\n<u>three</u>"),
    ]


def test_a_segment_without_words_is_not_lost() -> None:
    assert shown(ONE, segment(1.6, 1.9, " so", []), segment(2, 2, "", [])) == [
        (0.0, 1.5, "Alpha beta gamma"),
        (1.6, 1.9, "so"),
    ]


def test_layouts_reach_the_files() -> None:
    found, layout = Transcript([ONE]), SubtitleLayout(max_words_per_line=2)
    assert written(found, "srt", layout) == (
        "1\n00:00:00,000 --> 00:00:01,000\nAlpha beta\n\n2\n00:00:01,000 --> 00:00:01,500\ngamma\n"
    )
    assert written(found, "vtt", layout).count("-->") == 2
    assert [written(found, name, layout) for name in ("txt", "tsv", "json")] == [
        WRITERS[name](found) for name in ("txt", "tsv", "json")
    ]


@pytest.mark.parametrize("name", ["max_line_width", "max_line_count", "max_words_per_line"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5])
def test_lines_are_counted_from_one(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} must be positive"):
        SubtitleLayout(**{name: value})
