"""A recording in flight delays neither text of another engine nor other recordings."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import Server, started, wait_for
from tests.serve.conftest import EARS, HEARD, NAME, completion
from tests.serve.recordings import encoded, noise, streamed, transcribe

CLIP = encoded(noise(1.0))
STREAMS, TOKENS = 16, 24


@functools.cache
def long_recording() -> bytes:
    """20 windows, each with all its fallbacks."""
    return encoded(noise(600.0))


@pytest.fixture(scope="module")
def both(engine: Path, whisper: Path) -> Iterator[Server]:
    """A server of a text engine and a speech engine."""
    names = ("--name", NAME, "--name", EARS)
    with started(engine, whisper, *names, "--unproven", "--max-seq-len", HEARD) as found:
        yield found


def texts(server: Server, name: str) -> list[int]:
    """Tokens that each of many streams at once has had at its end."""

    def one(place: int) -> int:
        body = completion(f"{name} {place}: a fire", max_tokens=TOKENS, ignore_eos=True)
        events = server.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
        count: int = events[-1]["usage"]["completion_tokens"]
        return count

    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(one, range(STREAMS)))


@pytest.mark.slow
def test_text_streams_during_a_recording(both: Server) -> None:
    """From its upload on, and while its windows run; both engines go on."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(streamed, both, long_recording(), language="en")
        assert texts(both, "upload") == [TOKENS] * STREAMS
        recording = asked.result()
        events = iter(recording)
        assert next(events)["type"] == "transcript.text.delta"
        transcribed = both.metric("ingot_generation_tokens_total", model_name=EARS)
        assert texts(both, "windows") == [TOKENS] * STREAMS
        assert both.metric("ingot_audio_requests_total") == 0, "the recording ended first"
        more = lambda: both.metric("ingot_generation_tokens_total", model_name=EARS) > transcribed  # noqa: E731
        wait_for("the recording to go on", more)
        recording.close()
        wait_for("its place to be free", both.idle)


@pytest.mark.slow
def test_clips_during_a_long_recording(speech_server: Server) -> None:
    """Of the same engine: their windows share its steps."""
    fast: dict[str, Any] = {"temperature": 0.2, "language": "en"}
    alone = transcribe(speech_server, CLIP, **fast).data
    recording = streamed(speech_server, long_recording(), language="en")
    assert next(iter(recording))["type"] == "transcript.text.delta"
    ended = speech_server.metric("ingot_audio_requests_total")
    with ThreadPoolExecutor(3) as pool:
        clips = list(pool.map(lambda _: transcribe(speech_server, CLIP, **fast), range(6)))
    assert [(one.status, one.data) for one in clips] == [(200, alone)] * 6
    assert speech_server.metric("ingot_audio_requests_total") - ended == 6, "the recording ended first"
    recording.close()
    wait_for("its place to be free", speech_server.idle)
