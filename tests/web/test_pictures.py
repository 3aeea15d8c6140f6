"""The page of a model that takes pictures, in a real browser: by the button, dropped and pasted."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.adapters.web.page_messages import MOST_PICTURE
from recipes.vision.draw import draw, png
from recipes.vision.scenes import held_out_scene
from tests.serve.client import Server, started
from tests.vision.conftest import COLOUR, POCKET
from tests.web.browser import MISSING, Chat, chromium
from tests.web.processes import page_of

IS_MISSING = not all(importlib.util.find_spec(name) for name in ("gradio", "playwright"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(IS_MISSING, reason=MISSING)]
# What a browser makes of a file that is dropped or pasted.
GIVE = """(box, [kind, data]) => {
  const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], "scene.png", {type: "image/png"}));
  const options = {bubbles: true, cancelable: true};
  const event = kind === "paste"
    ? new ClipboardEvent(kind, {...options, clipboardData: given})
    : new DragEvent(kind, {...options, dataTransfer: given});
  box.dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def scene() -> bytes:
    """An orange square and nothing else."""
    return png(draw([held_out_scene(1)])[0])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with started(POCKET, "--unproven", "--name", "vision", "--max-batch-size", 4) as found:
        yield found


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    with page_of(f"http://127.0.0.1:{server.port}") as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def chat(browser: Any, url: str) -> Iterator[Chat]:
    found = Chat(browser, url)
    found.until("the button", lambda: found.tab.get_by_label("Upload").count() or picker(found).count())
    yield found
    assert found.hosts == {url.removeprefix("http://")}
    found.close()


def picker(chat: Chat) -> Any:
    return chat.tab.locator("input[type=file]").first


def pick(chat: Chat, file: Any) -> None:
    """Choose a file, once the box takes one again."""
    chat.until("the box to be free", chat.box.is_enabled)
    picker(chat).set_input_files(file)


def thumbnails(chat: Chat) -> Any:
    """In the box, before the message is sent."""
    return chat.tab.locator(".thumbnails img, .thumbnail-item img")


def test_a_picture_by_the_button_and_a_second_round(chat: Chat, server: Server, scene: bytes) -> None:
    """Its thumbnail is in the box, then in the conversation; an empty page says how large it may be."""
    assert chat.tab.get_by_placeholder("up to 11 MiB").count()
    pick(chat, {"name": "scene.png", "mimeType": "image/png", "buffer": scene})
    chat.until("the thumbnail", thumbnails(chat).count)
    chat.say(COLOUR)
    assert chat.whole_answer().strip() == "orange"
    assert not thumbnails(chat).count()
    assert chat.tab.locator(".message.user img").count() == 1
    chat.say(COLOUR)
    assert chat.whole_answer(2).strip() == "orange"


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_a_picture_that_is_dropped_or_pasted(chat: Chat, scene: bytes, kind: str) -> None:
    chat.until("the box to be free", chat.box.is_enabled)
    chat.box.evaluate(GIVE, [kind, base64.b64encode(scene).decode()])
    chat.until("the thumbnail", thumbnails(chat).count)
    chat.say(COLOUR)
    assert chat.whole_answer().strip() == "orange"


def test_what_is_no_picture_or_too_large_is_reported(chat: Chat, tmp_path: Path, scene: bytes) -> None:
    """The chat goes on."""
    for number, (data, words) in enumerate(
        ((b"no picture", "this is no picture"), (bytes(MOST_PICTURE + 1), "scene.png is larger than 11 MiB")),
        1,
    ):
        file = tmp_path / "scene.png"
        file.write_bytes(data)
        pick(chat, file)
        chat.until("the file", chat.tab.get_by_label("Remove file").count)
        chat.say(COLOUR)
        assert words in chat.whole_answer(number)
    pick(chat, {"name": "scene.png", "mimeType": "image/png", "buffer": scene})
    chat.until("the thumbnail", thumbnails(chat).count)
    chat.say(COLOUR)
    assert chat.whole_answer(3).strip() == "orange"
