"""The page of a model that hears, in a real browser: a microphone, files, text with times, errors."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import ROOT, started
from tests.serve.recordings import encoded, noise
from tests.web.browser import MISSING, Chat, chromium
from tests.web.processes import page_of
from tests.web.upstream import NAME, Upstream, upstream

IS_MISSING = not all(importlib.util.find_spec(name) for name in ("gradio", "playwright"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(IS_MISSING, reason=MISSING)]

FAKE = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")  # it beeps
SEGMENTS = [
    {"start": 0.0, "end": 2.5, "text": " Hello there."},
    {"start": 61.0, "end": 63.0, "text": " Bye."},
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(*FAKE) as found:
        yield found


@pytest.fixture(scope="module")
def served() -> Iterator[Upstream]:
    with upstream(models=[{"id": NAME, "input_modalities": ["audio"]}]) as found:
        yield found


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "talk.wav"
    path.write_bytes(encoded(noise(2.0)))
    return path


@contextlib.contextmanager
def opened(browser: Any, url: str) -> Iterator[Chat]:
    found = Chat(browser, url)
    try:
        yield found
    finally:
        found.close()


def send(chat: Chat, recording: Path) -> None:
    """Choose a file and send it."""
    chat.tab.locator("input[type=file]").first.set_input_files(recording)
    chat.until("the file", chat.tab.get_by_label("Remove file").count)
    chat.press("Submit")


def test_a_file_becomes_text_with_times(browser: Any, served: Upstream, recording: Path) -> None:
    served.said = {"text": "Hello there. Bye.", "segments": SEGMENTS}
    with page_of(served.url) as url, opened(browser, url) as chat:
        send(chat, recording)
        chat.until("the words", lambda: "0:00.0 – 0:02.5 Hello there." in chat.last_answer())
        assert "1:01.0 – 1:03.0 Bye." in chat.last_answer()
        assert recording.read_bytes() in served.forms[-1]
        served.status, served.said = 400, {"error": {"message": "this is no audio that can be read"}}
        send(chat, recording)
        chat.until("the error", lambda: "this is no audio that can be read" in chat.shown())
        assert chat.hosts == {url.removeprefix("http://")}


def test_the_microphone(browser: Any, served: Upstream) -> None:
    served.status, served.said = 200, {"text": "Hello there. Bye.", "segments": SEGMENTS}
    with page_of(served.url) as url, opened(browser, url) as chat:
        chat.press("Record audio")
        chat.press("Start recording")
        chat.tab.wait_for_timeout(1500)
        chat.press("Stop recording")
        chat.press("Attach audio")
        chat.until("the recording", chat.tab.get_by_label("Remove file").count)
        chat.press("Submit")
        chat.until("the words", lambda: "Hello there." in chat.last_answer())
    assert b"Content-Type: audio/wav" in served.forms[-1]
    assert b"\r\n\r\nRIFF" in served.forms[-1]


def test_the_model_that_ships(browser: Any) -> None:
    with started(ROOT / "models" / "pocket-whisper", "--unproven") as server:
        address = f"http://127.0.0.1:{server.port}"
        with page_of(address) as url, opened(browser, url) as chat:
            assert chat.tab.get_by_label("Model").input_value() == "pocket-whisper"
            send(chat, ROOT / "examples" / "speech" / "talk.ogg")
            line = (
                "0:03.5 – 0:07.6 Soon her modern dancer flies from Naples to Stuttgart for eighty four years."
            )
            chat.until("the words", lambda: line in chat.last_answer())
            chat.say("Hello?")
            chat.until("the refusal", lambda: "takes no text" in chat.shown())
