"""Stretches of speech, the chunks made of them, and what chunked mode makes of these."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.audio.log_mel import RATE, WINDOW
from ingot.audio.recording_samples import read_audio
from ingot.errors import RequestError
from ingot.speech.segments import Segment, Word, moved
from ingot.speech.voice_activity import VoiceDetector, silences, speech_chunks

needs_webrtc = pytest.mark.skipif(importlib.util.find_spec("webrtcvad") is None, reason="no webrtcvad")


def silence(seconds: float) -> torch.Tensor:
    return torch.zeros(int(seconds * RATE))


@pytest.fixture(scope="module")
def voice(data: Path) -> torch.Tensor:
    """A president speaks for 11 seconds, with pauses."""
    return read_audio(data / "audio" / "jfk.flac")


@needs_webrtc
def test_speech_is_found_between_silence(voice: torch.Tensor) -> None:
    seconds = len(voice) / RATE
    samples = torch.cat([silence(3.0), voice, silence(4.0), voice, silence(2.0)])
    found = VoiceDetector()(samples)
    inside = [(3.0, 3.0 + seconds), (7.0 + seconds, 7.0 + 2 * seconds)]
    for start, end in found:
        assert any(a - 0.5 <= start < end <= b + 0.5 for a, b in inside), (start, end)
    assert 0.6 * 2 * seconds < sum(end - start for start, end in found) < 2 * seconds + 1.0
    assert all(before[1] < after[0] for before, after in pairwise(found))


@needs_webrtc
@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.1, 61.0])
def test_silence_has_no_speech(seconds: float) -> None:
    assert VoiceDetector()(silence(seconds)) == []


@pytest.mark.parametrize(
    ("voiced", "values", "expected"),
    [
        ([(0, 10)], {}, [(0.0, 0.36)]),  # padded no further than the recording
        ([(90, 100)], {}, [(2.64, 2.999)]),
        ([(0, 100)], {}, [(0.0, 2.999)]),
        ([(10, 14)], {}, [(0.24, 0.48)]),
        ([(10, 13)], {}, []),  # too short
        ([(10, 12), (14, 16)], {}, [(0.24, 0.54)]),  # and long enough together
        ([(10, 20), (24, 34)], {}, [(0.24, 1.08)]),  # a short pause
        ([(10, 20), (26, 36)], {}, [(0.24, 0.66), (0.72, 1.14)]),
        ([(10, 20), (26, 36)], {"pad": 0.1}, [(0.2, 1.18)]),  # what touches is one
        ([(10, 20), (26, 36)], {"min_silence": 0.2}, [(0.24, 1.14)]),
        ([(10, 20)], {"pad": 0.0}, [(0.3, 0.6)]),
        ([(10, 14)], {"min_speech": 0.2}, []),
    ],
)
def test_stretches_of_voiced_frames(
    monkeypatch: pytest.MonkeyPatch,
    voiced: list[tuple[int, int]],
    values: dict[str, float],
    expected: list[tuple[float, float]],
) -> None:
    """Frames of 30 ms; the last one is not whole."""
    frames = [any(start <= i < end for start, end in voiced) for i in range(100)]
    monkeypatch.setattr(VoiceDetector, "_voiced", lambda self, samples: frames)
    detector = VoiceDetector(**{"min_speech": 0.1, "min_silence": 0.15, "pad": 0.06} | values)  # type: ignore[arg-type]
    samples = silence(2.999)
    found = detector(samples)
    assert [one for span in found for one in span] == pytest.approx(
        [one for span in expected for one in span]
    )
    assert bool(speech_chunks(samples, detector)) == bool(expected)


@pytest.mark.parametrize("wrong", [{"mode": 4}, {"mode": -1}, {"pad": -0.1}, {"min_silence": float("nan")}])
def test_settings_of_the_detector_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        VoiceDetector(**wrong)


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install -c constraints.txt '.\[speech\]'"):
        VoiceDetector()(silence(1.0))


@pytest.mark.parametrize("count", [1, 480, 481, 2000 * 480 + 1])
def test_frames_are_16_bits_of_30_ms(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """What is beyond full scale is at it, and what is missing of the last frame is silence."""
    asked: list[bytes] = []

    class Vad:
        def __init__(self, mode: int) -> None:
            assert mode == 3

        def is_speech(self, frame: bytes, rate: int) -> bool:
            asked.append(frame)
            assert rate == RATE
            return False

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "webrtcvad", SimpleNamespace(Vad=Vad))
    samples = torch.full((count,), 0.5)
    samples[0], samples[-1] = 1.5, -1.5
    assert VoiceDetector(mode=3)(samples) == []
    assert {len(frame) for frame in asked} == {960}
    found = torch.frombuffer(bytearray(b"".join(asked)), dtype=torch.int16)
    assert len(found) == -(-count // 480) * 480
    assert set(found[1 : count - 1].tolist()) <= {16383}
    assert [found[0], found[count - 1]] == [-32767 if count == 1 else 32767, -32767]
    assert not found[count:].any()


def chunks(samples: torch.Tensor, *spans: tuple[float, float]) -> list[tuple[float, float]]:
    return [(a / RATE, b / RATE) for a, b in speech_chunks(samples, lambda _: list(spans))]


def test_stretches_share_chunks_of_at_most_30_seconds() -> None:
    samples = silence(100)
    assert chunks(samples, (1, 5), (6, 20), (25, 31), (32, 33), (90, 100)) == [(1, 31), (32, 33), (90, 100)]
    assert chunks(samples) == []


def test_a_long_stretch_is_cut_where_it_is_quiet() -> None:
    samples = torch.ones(100 * RATE)
    samples[20 * RATE : 20 * RATE + 3200] = 0
    found = speech_chunks(samples, lambda _: [(0.0, 100.0)])
    assert found[0][0] == 0
    assert 20 * RATE <= found[0][1] <= 20.2 * RATE
    assert found[-1][1] == len(samples)
    assert all(end - start <= WINDOW for start, end in found)
    assert [end for _, end in found[:-1]] == [start for start, _ in found[1:]], "nothing is lost"


@pytest.mark.parametrize(
    "found", [None, 3, [1], [(1, 2, 3)], [("a", 2)], [(2, 1)], [(-1, 2)], [(0, 3), (2, 4)], [(0, 11)],
              [(0, float("nan"))]],
)  # fmt: skip
def test_what_a_detector_returns_is_checked(found: Any) -> None:
    with pytest.raises(RequestError, match=r"voice detector.*0 to 10\.000"):
        speech_chunks(silence(10), lambda _: found)


def test_a_segment_from_a_chunks_start_begins_with_its_speech() -> None:
    """Not where the recording begins, a stretch was cut, or the detector is another."""
    found = [(0, 16000), (40000, 480000), (480000, 800000), (900000, 960000)]
    assert silences(found, VoiceDetector(pad=0.3)) == [0.0, 0.3, 0.0, 0.3]
    assert silences(found, lambda _: []) == [0.0] * 4
    assert silences([], VoiceDetector()) == []
    one = Segment(0, 0.0, 2.0, " Yes.", [1], 0.0, -0.1, 1.0, 0.0)
    assert [(s.start, s.end) for s in (moved(one, 1, 2.5, 9.0, 0.3), moved(one, 1, 2.5, 9.0))] == [
        (2.8, 4.5),
        (2.5, 4.5),
    ]
    later, short = replace(one, start=0.1), replace(one, end=0.2)
    assert moved(later, 1, 2.5, 9.0, 0.3).start == 2.6  # the model has named it
    assert moved(short, 1, 2.5, 9.0, 0.3).start == 2.7
    worded = replace(one, words=[Word(" Yes.", 0.1, 0.4, 1.0)])
    assert moved(worded, 1, 2.5, 9.0, 0.3).start == 2.5  # its words have times of their own
