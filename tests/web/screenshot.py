"""The pictures of the page in docs/serving.md: the pocket model tells a story, and is not done yet.

python -m tests.web.screenshot docs/page.png 1280 800
python -m tests.web.screenshot docs/page_phone.png 390 844
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.serve.client import started
from tests.web.browser import HEIGHT, WIDTH, Chat, chromium
from tests.web.processes import POCKET, held, page_of

WORDS = 40  # of the story


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
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
