"""Recordings for the server's tests, and forms that carry them.

hear(server, wav(noise(2.0)), response_format="text").data
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from tests.serve.client import Reply, Server, Stream

EARS = "ears"
TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
_LINE = "a-line-that-no-recording-has"
TYPE = f"multipart/form-data; boundary={_LINE}"


def noise(seconds: float, seed: int = 1) -> np.ndarray:
    """Something that changes as it goes on: float32 at 16 kHz."""
    count = int(seconds * 16000)
    swell = np.sin(np.arange(count) / 16000 * 2.1) ** 2
    return (0.2 * np.random.default_rng(seed).normal(size=count) * swell).astype(np.float32)


def encoded(samples: np.ndarray, kind: str = "WAV", rate: int = 16000) -> bytes:
    """A file's bytes."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


def write_whisper(folder: Path) -> Path:
    """A tiny random checkpoint with Whisper's architecture and ids, and its own vocabulary."""
    from tests.encoders.speech import write_multilingual, write_words

    write_multilingual(folder)
    write_words(folder)
    return folder


def form(*files: tuple[str, bytes], **fields: Any) -> bytes:
    """A body with files by their fields' names; a list is a field that is there several times."""
    parts = []
    for name, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            plain = f"{name}[]" if isinstance(value, list) else name
            text = one if isinstance(one, str) else json.dumps(one)
            parts.append(f'Content-Disposition: form-data; name="{plain}"\r\n\r\n{text}'.encode())
    for name, data in files:
        head = f'Content-Disposition: form-data; name="{name}"; filename="a.wav"\r\n'
        parts.append(head.encode() + b"Content-Type: audio/wav\r\n\r\n" + data)
    return (
        b"".join(b"--%s\r\n%s\r\n" % (_LINE.encode(), part) for part in parts) + f"--{_LINE}--\r\n".encode()
    )


def transcribe(server: Server, data: bytes, path: str = TRANSCRIBE, **fields: Any) -> Reply:
    """Have a recording transcribed."""
    return server.request("POST", path, form(("file", data), **{"model": EARS, **fields}), typed(server))


def streamed(server: Server, data: bytes, path: str = TRANSCRIBE, **fields: Any) -> Stream:
    """The same as events."""
    body = form(("file", data), **{"model": EARS, "stream": True, **fields})
    return Stream(*server._sent("POST", path, body, typed(server)))


def typed(server: Server) -> dict[str, str]:
    """Headers of a form."""
    return {"Content-Type": TYPE, **server.headers}
