"""A page in a browser: how to read it, and how to press its buttons.

Owns the start of Chromium, the record of every request that the browser makes, and the places of things on
the page. Knows nothing of what a test expects.

    with chromium() as browser:
        chat = Chat(browser, "http://127.0.0.1:7860")
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.client import wait_for

MISSING = (
    "the page's browser tests need: pip install -c constraints.txt '.[web]' playwright; "
    "apt-get install chromium"
)
WIDTH, HEIGHT = 1100, 680
PHONE = 768  # of narrower pages the settings are closed


@contextlib.contextmanager
def chromium(*args: str) -> Iterator[Any]:
    """A headless Chromium, with flags of its own: the system's, or else Playwright's."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as play:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", *args])
        except Error as error:
            pytest.skip(f"{MISSING} ({str(error).splitlines()[0]})")
        try:
            yield browser
        finally:
            browser.close()


class Chat:
    """One reader's page.

    Attributes:
        hosts: of every request that the page has made.
    """

    def __init__(self, browser: Any, url: str, width: int = WIDTH, height: int = HEIGHT) -> None:
        self._context = browser.new_context(viewport={"width": width, "height": height})
        self.tab = self._context.new_page()
        self.requests: list[str] = []
        self._context.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(url)
        self.until("the models", lambda: self.tab.get_by_label("Model").input_value())
        if width >= PHONE:
            self.until("the settings", self.settings_are_open)  # the page's last step

    @property
    def hosts(self) -> set[str]:
        found = {urlsplit(url) for url in self.requests}
        return {one.netloc for one in found if one.scheme not in ("data", "blob")}

    @property
    def box(self) -> Any:
        """Where the reader types."""
        return self.tab.get_by_placeholder("Type a message").or_(self.tab.locator("textarea").last).last

    def settings_are_open(self) -> bool:
        return bool(self.tab.locator(".sidebar.open").count())

    def say(self, text: str) -> None:
        """Send a message."""
        self.until("the box to be free", self.box.is_enabled)
        self.box.fill(text)
        self.box.press("Enter")

    def shown(self) -> str:
        """All text of the conversation."""
        return str(self.tab.get_by_role("log").inner_text())

    def answers(self) -> list[str]:
        """The texts of answers; one that has not begun is empty."""
        texts = self.tab.locator(".message.bot").all_inner_texts()
        return ["" if text == "Loading content" else str(text) for text in texts]

    def last_answer(self) -> str:
        """The text of the last answer; empty: there is none."""
        return (self.answers() or [""])[-1]

    def begun(self, number: int = 1) -> None:
        """Wait until the answer of this number has begun."""
        self.until("an answer", lambda: len(self.answers()) == number and self.last_answer())

    def whole_answer(self, number: int = 1) -> str:
        """The answer of this number, once it has ended."""
        self.begun(number)
        self.until("its end", lambda: not self.is_answering())
        return self.last_answer()

    def press(self, name: str) -> None:
        """A button by its name; of several, the last."""
        self.tab.get_by_role("button", name=name).last.click()

    def press_stop(self) -> None:
        self.tab.locator("button.stop-button").click()

    def is_answering(self) -> bool:
        return bool(self.tab.locator("button.stop-button").is_visible())

    def fill(self, label: str, value: str) -> None:
        """A number of the side bar."""
        field = self.tab.get_by_label(label).and_(self.tab.locator("input[type=number]")).first
        field.fill(value)
        field.press("Tab")

    def until(self, what: str, condition: Any) -> None:
        """Wait; the browser's events come meanwhile."""

        def holds() -> bool:
            self.tab.wait_for_timeout(20)
            return bool(condition())

        wait_for(what, holds)

    def close(self) -> None:
        """Leave."""
        self._context.close()
