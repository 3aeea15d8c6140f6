"""Unusable recordings are refused by name, before they cost much; later faults are reported."""

from __future__ import annotations

import functools
import http.client
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.audio_files import media, silent_film
from tests.serve.client import Reply, Server, is_gone, memory, started, wait_for
from tests.serve.conftest import EARS, HEARD, chat, completion
from tests.serve.recordings import (
    TRANSCRIBE,
    TRANSLATE,
    TYPE,
    encoded,
    form,
    noise,
    streamed,
    transcribe,
    typed,
)

CLIP = encoded(noise(1.0))
FAST: dict[str, Any] = {"temperature": 0.2, "language": "en"}
VERBOSE = {"response_format": "verbose_json"}

BAD_FIELDS = [
    ({"response_format": "diarized_json"}, "response_format"),
    ({"response_format": "txt"}, "response_format"),
    ({"language": "klingon"}, "language"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "nan"}, "temperature"),
    ({"prompt": "word " * 5000}, "prompt"),
    ({"stream": "maybe"}, "stream"),
    ({"stream": True, "response_format": "srt"}, "stream"),
    ({"timestamp_granularities": ["segment"]}, "timestamp_granularities"),
    ({"timestamp_granularities": ["letter"], **VERBOSE}, "timestamp_granularities[0]"),
    ({"include": ["logprobs"]}, "include"),
    ({"languages": ["en", "de"]}, "languages"),
    ({"known_speaker_names": ["Ann"]}, "known_speaker_names"),
    ({"chunking_strategy": {"type": "server_vad"}}, "chunking_strategy"),
    ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy"),  # as OpenAI's clients send an object
    ({"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "0.5"}, "chunking_strategy"),
    ({"chunking_strategy": "auto", "chunking_strategy[type]": "server_vad"}, "chunking_strategy"),
    ({"chunking_strategy": "manual"}, "chunking_strategy"),
    ({"timestamp_granularities[0]": "word", **VERBOSE}, "timestamp_granularities"),
]


@functools.cache
def long_recording() -> bytes:
    return encoded(noise(100.0), "FLAC")


@pytest.mark.parametrize(("fields", "field"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_fields(speech_server: Server, fields: dict[str, Any], field: str) -> None:
    reply = transcribe(speech_server, CLIP, **FAST | fields)
    assert (reply.status, reply.error["param"]) == (400, field), reply.data
    assert field.partition("[")[0] in reply.error["message"]


def test_neutral_values_are_accepted(speech_server: Server) -> None:
    plain = transcribe(speech_server, CLIP, **FAST)
    odd = transcribe(
        speech_server, CLIP, **FAST, chunking_strategy="auto", stream="false", user="me", response_format=""
    )
    assert (odd.status, odd.data) == (200, plain.data)


def spoiled(kind: str) -> bytes:
    """A recording that cannot be read."""
    flac, mp3, ogg = (encoded(noise(10.0), kind) for kind in ("FLAC", "MP3", "OGG"))
    return {
        "a text": b"These are notes, not a recording.\n" * 50,
        "cut off": flac[: len(flac) // 2],
        "a cut mp3": mp3[: len(mp3) // 2],
        "a cut ogg": ogg[: len(ogg) // 2],
        "two of ogg": ogg + media(noise(1.0), "ogg", "libopus"),
        "a film without sound": silent_film(),
        "a playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "nothing": encoded(noise(0.0)),
        "16 bits as floats": media(noise(1.0) * 32767, "wav", "pcm_f32le"),
        "damaged": flac[: len(flac) // 2] + bytes(len(flac) // 2),
        "not numbers": encoded(np.full(1000, np.nan, np.float32), "WAV"),
        "a header alone": CLIP[:44],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a text", "no audio that can be read"),
        ("cut off", "the audio ends early"),
        ("damaged", "the audio ends early"),
        ("a cut mp3", "the audio ends early"),
        ("a cut ogg", "the audio ends early"),
        ("two of ogg", "several recordings in one file"),
        ("a film without sound", "the file has no audio track"),
        ("a playlist", "no audio that can be read"),
        ("nothing", "the recording is empty"),
        ("16 bits as floats", "samples are out of range"),
    ],
)
def test_files_that_cannot_be_read(speech_server: Server, kind: str, message: str) -> None:
    reply = transcribe(speech_server, spoiled(kind), **FAST)
    assert (reply.status, reply.error["param"]) == (400, "file"), reply.data
    assert message in reply.error["message"]
    assert "/" not in reply.error["message"]
    assert "allow_truncated" not in reply.error["message"], "which is no field of a form"


@pytest.mark.parametrize("kind", [("ipod", "aac"), ("webm", "libopus"), ("matroska", "flac"), ("mp3", "mp3")])
def test_what_phones_and_browsers_send(speech_server: Server, kind: tuple[str, str]) -> None:
    """Also a film's sound; the file's name and type say nothing."""
    data = media(noise(1.0), *kind, video=kind[0] in ("ipod", "matroska"))
    reply = transcribe(speech_server, data, **FAST)
    assert reply.status == 200, reply.data
    assert reply.json["usage"]["seconds"] == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("seconds", [0.001, 0.1])
def test_short_recordings_are_transcribed(speech_server: Server, seconds: float) -> None:
    reply = transcribe(speech_server, encoded(noise(seconds)), **FAST)
    assert reply.status == 200, reply.data
    assert reply.json["usage"]["seconds"] == pytest.approx(seconds, abs=1e-3)
    transcript_of_silence = transcribe(speech_server, encoded(np.zeros(16000, np.float32)), **FAST)
    assert transcript_of_silence.status == 200


def test_stereo_at_another_rate(speech_server: Server) -> None:
    stereo = np.stack([noise(1.0), noise(1.0)], 1)
    assert transcribe(speech_server, encoded(stereo, "WAV", rate=48000), **FAST).json["usage"][
        "seconds"
    ] == pytest.approx(1 / 3, abs=1e-4)


def test_forms(speech_server: Server) -> None:
    def sent(body: bytes, kind: str | None = None) -> Reply:
        headers = typed(speech_server) if kind is None else {"Content-Type": kind}
        return speech_server.request("POST", TRANSCRIBE, body, headers)

    fields = {"model": EARS, **FAST}
    wrong = [
        (sent(b"{}", "application/json"), 415, None),
        (sent(CLIP, "audio/wav"), 415, None),
        (sent(form(("file", CLIP), **fields), "multipart/form-data"), 400, None),
        (sent(b"no form at all"), 400, None),
        (sent(form(**fields)), 400, "file"),
        (sent(form(**fields, file="a text")), 400, "file"),
        (sent(form(("audio", CLIP), **fields)), 400, "file"),
        (sent(form(("file", CLIP), ("file", CLIP), **fields)), 400, None),
        (sent(form(("file", b""), **fields)), 400, "file"),
        (sent(form(("file", CLIP), model="other")), 404, "model"),
        (sent(form(("file", CLIP), **fields)[:-200]), 400, "file"),
        (sent(form(("file", CLIP), **fields, **{f"f{i}": "x" for i in range(300)})), 400, None),
    ]
    for reply, status, field in wrong:
        assert (reply.status, reply.error["param"]) == (status, field), reply.data
    assert sent(form(("file", CLIP), **FAST)).status == 200  # by the only model
    explained = {**typed(speech_server), "X-Ingot-Explain": "1"}
    assert speech_server.request("POST", TRANSCRIBE, form(("file", CLIP), **fields), explained).status == 400
    for origin in ("https://elsewhere.example", "null"):
        other = {**typed(speech_server), "Origin": origin}
        assert speech_server.request("POST", TRANSCRIBE, form(("file", CLIP), **fields), other).status == 403
    own = {**typed(speech_server), "Origin": f"http://127.0.0.1:{speech_server.port}"}
    assert speech_server.request("POST", TRANSCRIBE, form(("file", CLIP), **fields), own).status == 200


@pytest.mark.parametrize("name", ["charset", "CHARSET"])
def test_a_form_is_utf_8(speech_server: Server, name: str) -> None:
    """The parser would take any codec of Python: some raise, others rename fields."""
    body = form(("file", CLIP), model=EARS, **FAST)
    for charset in ("utf-8", "UTF-8", '"utf-8"', "utf8"):
        headers = {**typed(speech_server), "Content-Type": f"{TYPE}; {name}={charset}"}
        assert speech_server.request("POST", TRANSCRIBE, body, headers).status == 200
    others = (
        "undefined",
        "IDNA",
        "punycode",
        "unicode_escape",
        "UTF-7",
        '"utf-16"',
        "latin-1",
        "zlib",
        "none",
        "",
    )
    for charset in others:
        headers = {**typed(speech_server), "Content-Type": f"{TYPE}; {name}={charset}"}
        reply = speech_server.request("POST", TRANSCRIBE, body, headers)
        assert (reply.status, reply.error["code"]) == (400, "unsupported_charset"), (charset, reply.data)
        assert "Content-Type" in reply.error["message"]
        assert "utf-8" in reply.error["message"]


def test_each_model_lists_its_input_modalities(speech_server: Server, server: Server) -> None:
    for path in (TRANSCRIBE, TRANSLATE):
        reply = transcribe(server, CLIP, path, model="pocket")
        assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
        assert "does not take speech" in reply.error["message"]
    bodies = {
        "/v1/chat/completions": chat(),
        "/v1/completions": completion(),
        "/v1/responses": {"input": "Hi"},
        "/v1/embeddings": {"input": "Hi"},
        "/chat/": {"prompt": "Hi"},
    }
    for path, body in bodies.items():
        reply = speech_server.post(path, body | {"model": EARS})
        assert reply.status == 400
        assert TRANSCRIBE in reply.error["message"]
    assert speech_server.post("/tokenize", {"prompt": "Hi"}).status == 200


@pytest.mark.slow
def test_bounds_and_a_sigterm_that_lets_recordings_end(whisper: Path) -> None:
    """Bytes before they are read, seconds before they are decoded: an hour of silence is 30 kB. Recordings in
    flight have all their windows transcribed, and the exit code is 0.
    """
    words = ("--max-audio", 1 << 20, "--max-audio-seconds", 60, "--max-batch-size", 2, "--max-queue", 0)
    with started(whisper, "--unproven", "--max-seq-len", HEARD, *words) as server:
        before = memory(server.process.pid)
        hour = encoded(np.zeros(16000 * 3600, np.float32), "FLAC")
        assert len(hour) < 1 << 20
        reply = transcribe(server, hour, **FAST)
        assert (reply.status, reply.error["param"]) == (400, "file")
        assert "too long" in reply.error["message"]
        reply = transcribe(server, bytes((1 << 20) + 1), **FAST)
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert reported_length(server, 200 << 20) == 413
        assert sends_on_and_on(server) in (413, None)
        assert memory(server.process.pid, peak=True) - before < 64 << 20
        with ThreadPoolExecutor(2) as pool:
            talk = encoded(noise(40.0)[::2], "FLAC", rate=8000)
            asked = [pool.submit(lambda: list(streamed(server, talk, **FAST))) for _ in range(2)]
            wait_for("both to be heard", lambda: answers_under_way(server) >= 2)
            reply = transcribe(server, CLIP, **FAST)
            assert (reply.status, reply.error["code"]) == (429, "queue_full")
            assert "retry-after" in reply.headers
            server.process.terminate()
            for one in asked:
                assert one.result()[-1]["type"] == "transcript.text.done"
                read = one.result()[-1]["usage"]["input_token_details"]["audio_tokens"]
                assert read >= 2 * 1500  # whole windows to the end of 40 s; where they begin, the text says
                assert read % 1500 == 0
            assert server.process.wait(timeout=30) == 0
            assert "Traceback" not in "".join(server.lines)


def answers_under_way(server: Server) -> float:
    return sum(server.metric(f"ingot_num_requests_{state}") for state in ("running", "waiting"))


def reported_length(server: Server, length: int) -> int:
    """The status of a body that is announced and does not come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("POST", TRANSCRIBE)
    for name, value in {**typed(server), "Content-Length": str(length)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse().status


def sends_on_and_on(server: Server) -> int | None:
    """The status of a body of 200 MB in chunks; None where the connection is closed first."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    head = form(("file", b"")).rpartition(b"\r\n--")[0]
    chunks = (head if i == 0 else bytes(1 << 20) for i in range(201))
    try:
        connection.request("POST", TRANSCRIBE, chunks, typed(server), encode_chunked=True)
        return connection.getresponse().status
    except OSError:
        return None


def test_who_leaves_frees_the_place(speech_server: Server) -> None:
    for stream in (True, False):
        tokens = speech_server.metric("ingot_generation_tokens_total")
        body = form(("file", long_recording()), model=EARS, language="en", stream=stream)
        connection = socket.create_connection(("127.0.0.1", speech_server.port))
        head = f"POST {TRANSCRIBE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in typed(speech_server).items())
        connection.sendall(head.encode() + b"\r\n" + body)
        wait_for("it to run", lambda: speech_server.metric("ingot_num_requests_running") > 0)
        connection.close()
        wait_for("its place to be free", speech_server.idle)
        once = speech_server.metric("ingot_generation_tokens_total")
        assert once - tokens < 4 * 26 * 26  # of four windows with all their fallbacks
        assert transcribe(speech_server, CLIP, **FAST).status == 200


@pytest.mark.slow
def test_an_engine_dies_and_a_drain_has_a_deadline(whisper: Path) -> None:
    """Streams and full answers end with an error, new recordings are refused, the other model goes on. What
    is open at the deadline ends with an error, too.
    """
    words = ("--name", "a", "--name", "b", "--unproven", "--max-seq-len", 2 * HEARD, "--drain-seconds", 0.2)
    with started(whisper, whisper, *words) as server, ThreadPoolExecutor(2) as pool:
        streams = {name: iter(streamed(server, long_recording(), model=name, **FAST)) for name in "ab"}
        whole = pool.submit(transcribe, server, long_recording(), model="a", **FAST)
        for stream in streams.values():
            assert next(stream)["type"] == "transcript.text.delta"
        first, second = server.engine_pids()
        os.kill(first, signal.SIGKILL)
        *deltas, last = streams["a"]
        assert last["error"]["code"] == "engine_dead"
        assert {one["type"] for one in deltas} <= {"transcript.text.delta"}
        assert whole.result().error["code"] == "engine_dead"
        reply = transcribe(server, CLIP, model="a")
        assert (reply.status, reply.error["code"]) == (503, "engine_dead")
        server.process.terminate()
        *_, last = streams["b"]
        assert last["error"]["code"] == "server_stopping"
        assert server.process.wait(timeout=30) == 0
        assert is_gone(second)
        assert "Traceback" not in "".join(server.lines)
