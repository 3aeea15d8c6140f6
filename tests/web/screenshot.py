"""The pictures of the page in docs/serving.md: the pocket model tells a story, and is not done yet.

python -m tests.web.screenshot docs/page.png 1280 800
python -m tests.web.screenshot docs/page_phone.png 390 844
python -m tests.web.screenshot docs/page_vision.png --picture
"""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.vision.draw import draw, png
from recipes.vision.scenes import held_out_scene
from tests.serve.client import ROOT, started
from tests.web.browser import HEIGHT, WIDTH, Chat, chromium
from tests.web.processes import POCKET, held, page_of

WORDS = 40  # of the story
VISION = ROOT / "models/pocket-vision/minigpt4.yaml"
SCENE = 1


def talk_about_a_picture(path: Path) -> None:
    """The picture model says what it sees, and answers a question."""
    scene = png(draw([held_out_scene(SCENE)])[0])
    words = (VISION, "--unproven", "--name", "pocket-vision")
    with started(*words) as server, page_of(f"http://127.0.0.1:{server.port}") as url, chromium() as browser:
        chat = Chat(browser, url, height=HEIGHT + 100)
        chosen = chat.tab.locator("input[type=file]").first
        chat.until("the button", chosen.count)
        chosen.set_input_files({"name": "scene.png", "mimeType": "image/png", "buffer": scene})
        chat.until("the thumbnail", chat.tab.get_by_label("Remove file").count)
        chat.say("Describe this image.")
        chat.whole_answer()
        chat.say("What colour is the square?")
        chat.whole_answer(2)
        chat.tab.wait_for_timeout(500)
        chat.tab.screenshot(path=path)


def main(path: Path, width: int = WIDTH, height: int = HEIGHT) -> None:
    """Take it."""
    with started(*POCKET) as server, page_of(f"http://127.0.0.1:{server.port}") as url, chromium() as browser:
        chat = Chat(browser, url, width, height)
        chat.say("What is 27 + 58?")
        chat.whole_answer()
        chat.say("Tell me a story about a fox.")
        chat.until(
            "half a story", lambda: len(chat.answers()) == 2 and len(chat.last_answer().split()) > WORDS
        )
        with held(server):
            chat.tab.wait_for_timeout(500)  # what is on its way
            assert chat.is_answering()
            chat.tab.screenshot(path=path)


if __name__ == "__main__":
    file, *rest = sys.argv[1:]
    if rest == ["--picture"]:
        talk_about_a_picture(Path(file))
    else:
        main(Path(file), *map(int, rest))
    print(f"{file}: {Path(file).stat().st_size} bytes")
