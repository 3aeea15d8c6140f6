"""Every format, to the character; words make lines of subtitles."""

from __future__ import annotations

import json

import pytest

from ingot.speech.recording import Transcript
from ingot.speech.segments import Segment, Word
from ingot.speech.writers import WRITERS, clock, cues


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
    told = json.loads(WRITERS["json"](FOUND))
    assert told["text"] == FOUND.text
    assert told["language"] == "en"
    assert [one["end"] for one in told["segments"]] == [1.5, 1.5, 3661.0]


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
    ("seconds", "told"),
    [(0, "00:00:00,000"), (59.9996, "00:01:00,000"), (360_000, "100:00:00,000"), (-1, "00:00:00,000")],
)
def test_clocks(seconds: float, told: str) -> None:
    assert clock(seconds, ",") == told


def test_words_make_lines_of_bounded_length() -> None:
    words = [Word(f" word{i:02}", i * 0.5, i * 0.5 + 0.4, 1.0) for i in range(30)]
    words[20:] = [Word(w.text, w.start + 5, w.end + 5, 1.0) for w in words[20:]]
    found = list(cues(Transcript([segment(0, 20, "".join(w.text for w in words), words)])))
    assert " ".join(" ".join(cue.text.split("\n")) for cue in found) == " ".join(
        w.text.strip() for w in words
    )
    assert all(len(line) <= 42 for cue in found for line in cue.text.split("\n"))
    assert all(cue.text.count("\n") <= 1 for cue in found)
    assert [cue.end for cue in found if cue.text.endswith("word19")] == [9.9], "a pause ends a subtitle"
