"""The requests of ``benchmarks/stalls.py``: whole, and never the same twice."""

from __future__ import annotations

import io
import sys
import wave
from email import message_from_bytes
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from neighbours import CASES, EARS, HEARD, TRANSCRIBE, Maker


@pytest.mark.parametrize("kind", ["ordinary", *CASES, *HEARD])
def test_every_request_is_whole_and_new(kind: str) -> None:
    make = getattr(Maker("m", longest=512, per_word=1.5, seed=1), kind)
    first = make()
    head, _, body = first.partition(b"\r\n\r\n")
    assert int(head.lower().partition(b"content-length: ")[2].split()[0]) == len(body)
    assert kind == "pieces" or make() != first


def test_a_recording_is_a_form_with_a_minute_of_sound() -> None:
    request = Maker("m", longest=512, per_word=1.5, seed=1).recording()
    line, _, message = request.partition(b"\r\n")
    assert line == f"POST {TRANSCRIBE} HTTP/1.1".encode()
    parts = message_from_bytes(message).get_payload()
    found = {
        one.get_param("name", header="content-disposition"): one.get_payload(decode=True) for one in parts
    }
    assert (found["model"], found["language"]) == (EARS.encode(), b"en")
    with wave.open(io.BytesIO(found["file"])) as sound:
        assert sound.getnframes() / sound.getframerate() == 60
