"""Recordings over HTTP: every format, the same words as without a server, and streams."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from ingot.serve.api.transcriptions import TranscriptionCall, _options
from ingot.serve.request_schemas import AudioRequest
from ingot.speech.recording_features import Transcript
from ingot.speech.segments import Segment
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.transcriber import Transcriber
from ingot.speech.transcript_writers import WRITERS
from tests.serve.client import PATIENCE, ROOT, Server
from tests.serve.conftest import EARS, HEARD
from tests.serve.published import Schema
from tests.serve.recordings import TRANSLATE, encoded, noise, streamed, transcribe

SECONDS = 33.0  # more than a window
FAST = {"temperature": 0.2}
WARM = {"temperature": 1.0}  # texts that differ


@pytest.fixture(scope="module")
def alone(whisper: Path) -> Transcriber:
    """The model without a server, with windows as short."""
    found = Transcriber(whisper, "cpu", max_seq_len=HEARD, max_batch_size=8)
    found.vocabulary = dataclasses.replace(found.vocabulary, longest=HEARD)
    return found


@pytest.fixture(scope="module")
def wanted(alone: Transcriber) -> Transcript:
    return alone(noise(SECONDS), language="de", temperatures=(0.2,))


@pytest.fixture(scope="module")
def talk() -> bytes:
    return encoded(noise(SECONDS), "FLAC")


def test_the_words_are_those_of_the_transcriber(
    speech_server: Server, alone: Transcriber, talk: bytes, published: Schema
) -> None:
    """With its fallbacks, and the language detected."""
    samples = encoded(noise(SECONDS), "FLAC")
    wanted = alone(samples)
    reply = transcribe(speech_server, talk, response_format="verbose_json")
    assert reply.status == 200, reply.data
    found = reply.json
    published.check("CreateTranscriptionResponseVerboseJson", found)
    assert found["text"] == wanted.text.strip()
    assert found["duration"] == wanted.duration == SECONDS
    transcribed = [segment for segment in wanted.segments if segment.text]
    assert len(transcribed) > 1
    assert [one["tokens"] for one in found["segments"]] == [one.tokens for one in transcribed]
    assert [(one["start"], one["end"]) for one in found["segments"]] == [
        (s.start, s.end) for s in transcribed
    ]
    assert found["segments"][0]["avg_logprob"] == pytest.approx(transcribed[0].avg_logprob, abs=1e-4)
    assert found["segments"][0]["no_speech_prob"] == pytest.approx(transcribed[0].no_speech_prob, rel=1e-3)
    assert {one["seek"] for one in found["segments"]} == {one.seek for one in transcribed}


def test_formats(speech_server: Server, wanted: Transcript, talk: bytes, published: Schema) -> None:
    def asked(kind: str) -> Any:
        return transcribe(speech_server, talk, response_format=kind, language="de", **FAST)

    reported = asked("json")
    published.check("CreateTranscriptionResponseJson", reported.json)
    assert reported.json == {"text": wanted.text.strip(), "usage": {"type": "duration", "seconds": SECONDS}}
    assert asked("text").data.decode() == wanted.text.strip() + "\n"
    for kind in ("srt", "vtt"):
        reply = asked(kind)
        assert reply.headers["content-type"].startswith("text/plain")
        assert reply.data.decode() == WRITERS[kind](wanted)
    assert asked("verbose_json").json["language"] == "german"
    only = transcribe(
        speech_server, talk, response_format="verbose_json", timestamp_granularities=["segment"], **FAST
    )
    assert "words" not in only.json


def test_a_language_without_a_name_is_reported_by_its_code() -> None:
    """A checkpoint may bring languages of its own."""
    unused: Any = None
    body = AudioRequest(model=EARS, response_format="verbose_json")
    call = TranscriptionCall(unused, body, "transcribe", lambda: b"")
    for code, name in (("de", "german"), ("tlh", "tlh"), (None, "english")):
        assert json.loads(call._response(Transcript(language=code)).body)["language"] == name


def test_segments_that_say_nothing_are_left_out() -> None:
    unused: Any = None
    body = AudioRequest(model=EARS, response_format="verbose_json")
    call = TranscriptionCall(unused, body, "transcribe", lambda: b"")
    segments = [
        Segment(i, i, i + 1, text, [1], 0.0, -0.1, 1.0, 0.01) for i, text in enumerate((" a", "", " b"))
    ]
    reported = json.loads(call._response(Transcript(segments, "en", 0.9, 3.0)).body)
    assert [(one["id"], one["text"]) for one in reported["segments"]] == [(0, " a"), (2, " b")]
    assert reported["text"] == "a b"


def test_words_have_the_transcriber_s_times(
    speech_server: Server, alone: Transcriber, published: Schema
) -> None:
    samples = encoded(noise(4.0, seed=5))
    asked = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
    found = transcribe(speech_server, samples, language="de", **asked, **FAST).json
    published.check("CreateTranscriptionResponseVerboseJson", found)
    wanted = alone(samples, language="de", temperatures=(0.2,), word_timestamps=True)
    words = [word for segment in wanted.segments for word in segment.words or ()]
    assert [one["word"] for one in found["words"]] == [word.text.strip() for word in words] != []
    for one, word in zip(found["words"], words, strict=True):
        assert (one["start"], one["end"]) == pytest.approx((word.start, word.end), abs=0.021)


def test_streams(speech_server: Server, wanted: Transcript, talk: bytes, published: Schema) -> None:
    *deltas, done = streamed(speech_server, talk, language="de", **FAST)
    for one in (*deltas, done):
        published.check("CreateTranscriptionResponseStreamEvent", one)
    assert len(deltas) == len([one for one in wanted.segments if one.text])
    assert "".join(one["delta"] for one in deltas).strip() == done["text"] == wanted.text.strip()
    assert done["usage"]["input_token_details"]["audio_tokens"] % 1500 == 0
    published.check("TranscriptTextDoneEvent", done)


def test_translations(speech_server: Server, alone: Transcriber, published: Schema) -> None:
    samples = noise(3.0, seed=4)
    found = transcribe(
        speech_server, encoded(samples), TRANSLATE, response_format="verbose_json", language="de", **FAST
    )
    published.check("CreateTranslationResponseVerboseJson", found.json)
    assert found.json["language"] == "english"
    wanted = alone(encoded(samples), language="de", task="translate", temperatures=(0.2,))
    assert found.json["text"] == wanted.text.strip()
    plain = transcribe(speech_server, encoded(samples), TRANSLATE, **FAST)
    published.check("CreateTranslationResponseJson", plain.json)


def test_what_is_read_before_changes_the_words(speech_server: Server, alone: Transcriber) -> None:
    samples = encoded(noise(3.0))
    found = transcribe(
        speech_server, samples, language="en", prompt="Ingot, kernels", keywords=["Whisper"], **FAST
    ).json
    options: dict[str, Any] = {"language": "en", "temperatures": (0.2,)}
    assert (
        found["text"]
        == alone(samples, **options, initial_prompt="Ingot, kernels", hotwords="Whisper").text.strip()
    )
    assert found["text"] != alone(samples, **options).text.strip()


@pytest.mark.slow
def test_a_prompt_for_every_window(speech_server: Server, alone: Transcriber) -> None:
    samples = encoded(noise(33.0))
    asked = {"language": "en", "prompt": "Ingot, kernels", "response_format": "verbose_json", **FAST}
    options: dict[str, Any] = {"language": "en", "temperatures": (0.2,), "initial_prompt": "Ingot, kernels"}
    for carry in (True, False):
        found = transcribe(speech_server, samples, **asked, carry_initial_prompt=str(carry).lower()).json
        assert found["text"] == alone(samples, **options, carry_initial_prompt=carry).text.strip()


@pytest.mark.slow
def test_many_clients_share_steps(speech_server: Server, alone: Transcriber) -> None:
    """Each gets the text that it gets alone."""
    recordings = [encoded(noise(2.0 + i, seed=i)) for i in range(6)]
    before = (
        speech_server.metric("ingot_audio_seconds_total"),
        speech_server.metric("ingot_audio_requests_total"),
    )
    with ThreadPoolExecutor(6) as pool:
        found = list(
            pool.map(
                lambda one: transcribe(speech_server, one, language="en", **WARM).json["text"], recordings
            )
        )
    wanted = [alone(one, language="en", temperatures=(1.0,)).text.strip() for one in recordings]
    assert found == wanted
    assert len(set(found)) > 2
    assert speech_server.metric("ingot_audio_seconds_total") - before[0] == sum(2.0 + i for i in range(6))
    assert speech_server.metric("ingot_audio_requests_total") - before[1] == 6
    assert speech_server.idle()


def test_the_model_lists_audio_input(speech_server: Server, server: Server) -> None:
    (facts,) = speech_server.get("/v1/models").json["data"]
    assert (facts["id"], facts["input_modalities"]) == (EARS, ["audio"])
    (facts,) = server.get("/v1/models").json["data"]
    assert facts["input_modalities"] == ["text"]


def test_openais_client(speech_server: Server, wanted: Transcript, talk: bytes) -> None:
    url = f"http://127.0.0.1:{speech_server.port}/v1"
    words: dict[str, Any] = {"model": EARS, "file": ("talk.flac", talk), "language": "de", "temperature": 0.2}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as api:
        create = api.audio.transcriptions.create
        plain = create(**words)
        verbose = create(
            **words,
            response_format="verbose_json",
            timestamp_granularities=["segment"],
            chunking_strategy="auto",
        )
        subtitles = create(**words, response_format="srt")
        *deltas, done = create(**words, stream=True)
        english = api.audio.translations.create(model=EARS, file=("talk.flac", talk), temperature=0.2)
        for strategy in ({"type": "server_vad"}, {"type": "server_vad", "threshold": 0.4}):
            with pytest.raises(openai.BadRequestError, match="voice activity detection") as vad:
                create(**words, chunking_strategy=strategy)
            assert vad.value.param == "chunking_strategy"
        with pytest.raises(openai.BadRequestError, match="language") as refused:
            create(**words | {"language": "klingon"})
    assert refused.value.param == "language"
    assert plain.text == verbose.text == wanted.text.strip()
    assert plain.usage.type == "duration"
    assert [one.start for one in verbose.segments] == [one.start for one in wanted.segments if one.text]
    assert subtitles == WRITERS["srt"](wanted)
    assert (done.type, done.text) == ("transcript.text.done", plain.text)
    assert "".join(one.delta for one in deltas).strip() == plain.text
    assert english.text


@pytest.mark.slow
def test_the_example(speech_server: Server, tmp_path: Path) -> None:
    (tmp_path / "talk.wav").write_bytes(encoded(noise(2.0)))
    words = [ROOT / "examples" / "clients" / "transcribe.py", tmp_path / "talk.wav"]
    url = f"http://127.0.0.1:{speech_server.port}"
    done = subprocess.run([sys.executable, *words, url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, *segments, streamed_text = done.stdout.splitlines()
    assert head.endswith(", 2.0 s")
    assert "".join("".join(line[16:] for line in segments).split()) == "".join(streamed_text.split())


def test_every_field_of_an_upload_reaches_the_transcriber() -> None:
    fields: Any = {
        "language": "de",
        "prompt": "Names: Ada.",
        "carry_initial_prompt": True,
        "temperature": 0.4,
    }
    body = AudioRequest(model=EARS, keywords=["Ada", "Grace"], **fields)
    assert _options(body, "translate", True) == TranscribeOptions(
        language="de",
        task="translate",
        initial_prompt="Names: Ada.",
        carry_initial_prompt=True,
        hotwords="Ada Grace",
        word_timestamps=True,
        temperatures=(0.4,),
    )
    assert _options(AudioRequest(model=EARS), "transcribe", False) == TranscribeOptions()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": None}, {}),
        ({"temperature": 0.0}, {}),  # where a text repeats itself others are tried, as without one
        ({"temperature": 1.0}, {"temperatures": (1.0,)}),
        ({"keywords": []}, {}),
        ({"keywords": ["Ada"]}, {"hotwords": "Ada"}),
        ({"prompt": ""}, {"initial_prompt": ""}),
        ({"carry_initial_prompt": False}, {}),
        ({"language": "German"}, {"language": "de"}),
    ],
)
def test_a_field_that_asks_for_nothing_leaves_the_default(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert _options(AudioRequest(model=EARS, **given), "transcribe", False) == TranscribeOptions(**expected)
