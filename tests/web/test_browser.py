"""The page in a real browser: what a reader sees and presses, and that nothing is asked of the outside.

It needs Gradio, Playwright and Chromium, and skips where one is missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import ROOT, Server, is_gone, started, wait_for
from tests.web.browser import MISSING, Chat, chromium
from tests.web.processes import POCKET, free_port, held, page_of
from tests.web.upstream import NAME, Upstream, delta, end, upstream

IS_MISSING = not all(importlib.util.find_spec(name) for name in ("gradio", "playwright"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(IS_MISSING, reason=MISSING)]

STORY = "Tell me a story about a fox."
OUTSIDE = "http://outside.example/seen.png"
KEY = "a-key-that-nobody-sees"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with started(*POCKET) as found:
        yield found


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    with page_of(f"http://127.0.0.1:{server.port}") as found:
        yield found


@pytest.fixture
def chat(browser: Any, url: str) -> Iterator[Chat]:
    with opened(browser, url) as found:
        yield found


@contextlib.contextmanager
def opened(browser: Any, url: str) -> Iterator[Chat]:
    """A reader's page, which has asked nobody else at its end."""
    found = Chat(browser, url)
    try:
        yield found
        assert found.hosts == {url.removeprefix("http://")}
    finally:
        found.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Upstream]:
    """A server that says what a test tells it to."""
    with upstream() as found:
        yield found


@pytest.fixture(scope="module")
def served_url(served: Upstream) -> Iterator[str]:
    with page_of(served.url) as found:
        yield found


def ended(server: Server) -> float:
    """Answers that were not broken off."""
    rows = re.findall(
        r"^ingot_request_success_total\{.*\} (\S+)$", server.get("/metrics").data.decode(), re.M
    )
    return sum(map(float, rows))


def test_the_models_and_their_length_are_listed(chat: Chat) -> None:
    chat.until("the models", lambda: chat.tab.get_by_label("Model").input_value() == "pocket")
    assert chat.tab.get_by_role("slider", name="Max tokens").get_attribute("max") == "8192"


def test_an_answer_grows_while_it_streams(chat: Chat) -> None:
    chat.say(STORY)
    seen = {""}

    def has_ended() -> bool:
        seen.add(chat.last_answer())
        return len(seen) > 2 and not chat.is_answering()

    chat.until("an answer", has_ended)
    whole = chat.last_answer()
    parts = {text for text in seen if whole.startswith(text)}
    assert len(parts) > 4
    assert len(whole) > 100


def test_the_values_of_the_side_bar_are_sent(chat: Chat) -> None:
    chat.fill("Max tokens", "3")
    chat.say(STORY)
    assert len(chat.whole_answer().split()) <= 3


def test_stop_ends_the_answer_on_the_server(chat: Chat, server: Server) -> None:
    before = server.metric("ingot_generation_tokens_total")
    successes = ended(server)
    chat.say(STORY)
    chat.begun()
    with held(server):
        assert server.metric("ingot_num_requests_running") == 1
        chat.press_stop()
        chat.until("the stop", lambda: not chat.is_answering())
        part = chat.last_answer()
    wait_for("the slot to be free", server.idle)
    assert ended(server) == successes  # broken off
    assert server.metric("ingot_generation_tokens_total") - before < 100
    assert chat.last_answer() == part
    chat.say("What is 12 + 30?")  # the page goes on
    assert "42" in chat.whole_answer(2)


def test_a_reader_who_leaves_ends_the_answer(browser: Any, served: Upstream, served_url: str) -> None:
    served.chunks = [delta("Half an answer"), threading.Event()]
    served.left.clear()
    with opened(browser, served_url) as chat:
        chat.say("First?")
        chat.begun()
        assert not served.left.is_set()
    assert served.left.wait(20)


def test_retry_undo_and_clear(chat: Chat, server: Server) -> None:
    chat.say("What is 12 + 30?")
    first = chat.whole_answer()
    tokens = server.metric("ingot_generation_tokens_total")
    chat.press("Retry")
    chat.until("another answer", lambda: server.metric("ingot_generation_tokens_total") > tokens)
    assert chat.whole_answer() == first
    assert chat.tab.locator(".message.bot").count() == 1
    chat.press("Undo")
    chat.until("the message in the box", lambda: chat.box.input_value() == "What is 12 + 30?")
    assert chat.last_answer() == ""
    chat.box.press("Enter")
    chat.whole_answer()
    chat.press("Clear")
    chat.until("an empty page", lambda: chat.tab.locator(".message").count() == 0)


def test_nothing_on_the_page_names_another_host(browser: Any, url: str) -> None:
    with opened(browser, url) as chat:
        html = chat.tab.request.get(url).text()
        links = chat.tab.locator("script[src], link[href], img[src], iframe[src]").evaluate_all(
            "all => all.map(one => one.src || one.href)"
        )
    assert [link for link in links if not link.startswith((url, "data:"))] == []
    outside = [one for one in re.findall(r"https?://[^\s\"'<>]+", html) if not one.startswith(url)]
    preview = {
        "gradio.app",
        "raw.githubusercontent.com",
    }  # of og: and twitter: tags, which browsers do not load
    assert {one.split("/")[2] for one in outside} <= preview


def test_the_page_s_process_asks_no_other_host(served: Upstream) -> None:
    program = """
import socket, sys
asked, plain = [], socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **more: asked.append(host) or plain(host, *rest, **more)
from ingot.config.server_config import WebConfig
from ingot.adapters.web.page_process import launched
with launched(WebConfig(sys.argv[1], web_port=int(sys.argv[2])), None):
    print(*{str(host) for host in asked})
"""
    words = [sys.executable, "-c", program, served.url, str(free_port())]
    found = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.split() == ["127.0.0.1"]


def test_thoughts_are_folded_once_the_answer_begins(browser: Any, served: Upstream, served_url: str) -> None:
    go_on = threading.Event()
    served.chunks = [delta(reasoning_content="Ten and ten."), go_on, delta("Twenty."), end()]
    with opened(browser, served_url) as chat:
        chat.say("What is 10 + 10?")
        thought = chat.tab.get_by_text("Ten and ten.")
        chat.until("the thought", thought.is_visible)
        go_on.set()
        chat.until("the answer", chat.tab.get_by_text("Twenty.").is_visible)
        chat.until("the thought to be folded", lambda: not thought.is_visible())
        assert chat.tab.get_by_text("Thoughts").is_visible()


def test_an_answer_cannot_make_the_browser_ask_the_outside(
    browser: Any, served: Upstream, served_url: str
) -> None:
    script = "<script src='http://outside.example/x.js'></script>"
    served.chunks = [delta(f"![a]({OUTSIDE}) <img src='{OUTSIDE}'> {script} done"), end()]
    blocked: list[str] = []
    with opened(browser, served_url) as chat:
        chat.tab.on("console", lambda one: blocked.append(one.text))
        chat.say("Show me.")
        chat.until("the answer", lambda: "done" in chat.last_answer())
        chat.until(
            "the picture to be refused", lambda: any("Content Security Policy" in one for one in blocked)
        )
        chat.requests = [one for one in chat.requests if one != OUTSIDE]  # asked for by the page, never sent
    assert any(OUTSIDE in one for one in blocked)


def test_what_was_shown_before_a_stop_is_part_of_the_conversation(
    browser: Any, served: Upstream, served_url: str
) -> None:
    served.chunks = [delta("Half an answer"), threading.Event()]
    served.left.clear()
    with opened(browser, served_url) as chat:
        chat.say("First?")
        chat.until("half an answer", lambda: "Half" in chat.last_answer())
        chat.press_stop()
        assert served.left.wait(20)
        served.chunks = [delta("Whole"), end()]
        chat.say("Second?")
        chat.until("the answer", lambda: "Whole" in chat.last_answer())
    assert [one["content"] for one in served.bodies[-1]["messages"]] == [
        "First?",
        "Half an answer",
        "Second?",
    ]


def test_errors_are_readable_and_a_retry_follows(browser: Any, served: Upstream, served_url: str) -> None:
    served.status, served.said, served.headers = 429, {"error": {"message": "all busy"}}, {"Retry-After": "3"}
    with opened(browser, served_url) as chat:
        chat.say("Hello?")
        chat.until("the error", lambda: "The server is busy: all busy. Try again in 3 s." in chat.shown())
        served.status, served.chunks = 200, [delta("Yes."), end()]
        chat.press("Retry")
        chat.until("the answer", lambda: "Yes." in chat.last_answer())
        assert "busy" not in chat.shown()
    assert served.bodies[-1]["messages"] == [{"role": "user", "content": "Hello?"}]
    assert served.bodies[-1]["model"] == NAME


def test_a_server_that_was_killed_is_reported(chat: Chat, server: Server) -> None:
    chat.say("What is 12 + 30?")
    chat.whole_answer()
    server.process.kill()
    server.process.wait()
    chat.say("And 1 + 1?")
    served = f"No server answers at http://127.0.0.1:{server.port}. Is it running?"
    chat.until("the error", lambda: served in chat.shown())
    chat.tab.reload()
    chat.until("the error", lambda: served in chat.tab.locator("body").inner_text())


def test_a_page_beside_its_server_has_the_key_and_ends_with_it(browser: Any, tmp_path: Path) -> None:
    port = free_port()
    with started(*POCKET, "--api-key", KEY, "--web", "--web-port", port) as server:
        url = f"http://127.0.0.1:{port}"
        wait_for("the page", lambda: f"the page is on {url}\n" in server.lines)
        with opened(browser, url) as chat:
            chat.say("What is 12 + 30?")
            assert "42" in chat.whole_answer()
            assert KEY not in chat.tab.content() + chat.tab.request.get(f"{url}/config").text()
        (page,) = [
            pid for pid in children(server.process.pid) if "ingot.adapters.web.page_process" in command(pid)
        ]
        assert KEY not in command(page) + Path(f"/proc/{page}/environ").read_text()
        server.process.terminate()
        assert server.process.wait(30) == 0
        assert is_gone(page)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> str:
    """Its command line."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


PHONE = (390, 844)
MANY = [
    {"id": "reads", "max_model_len": 512},
    {"id": "sees", "input_modalities": ["text", "image"]},
    {"id": "speaks", "input_modalities": ["text", "audio"]},
]


def test_on_a_phone_the_settings_are_closed_until_they_are_wanted(browser: Any, url: str) -> None:
    found = Chat(browser, url, *PHONE)
    try:
        found.tab.wait_for_timeout(500)
        assert not found.settings_are_open()
        box = found.box.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE[0]
        assert box["y"] + box["height"] <= PHONE[1]
        assert found.tab.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        found.say("What is 12 + 30?")
        assert "42" in found.whole_answer()
        found.tab.get_by_label("Toggle Sidebar").click()
        found.until("the settings", found.settings_are_open)
    finally:
        found.close()


def test_sending_nothing_does_nothing(chat: Chat, server: Server) -> None:
    tokens = server.metric("ingot_prompt_tokens_total")
    for text in ("", "   "):
        chat.box.fill(text)
        chat.box.press("Enter")
        chat.tab.wait_for_timeout(500)
        assert chat.tab.locator(".message").count() == 0
    assert server.metric("ingot_prompt_tokens_total") == tokens
    chat.say("What is 12 + 30?")
    assert "42" in chat.whole_answer()


def test_formulas_are_set_and_amounts_are_not(browser: Any, served: Upstream, served_url: str) -> None:
    served.chunks = [delta("Of $x^2$ and \\(y\\), costs $5 and $6; `$z$`"), end()]
    with opened(browser, served_url) as chat:
        assert chat.tab.title() == "Ingot"
        assert chat.tab.locator("h1").inner_text() == "Ingot"
        chat.say("What?")
        chat.until("the formulas", lambda: chat.tab.locator(".message.bot .katex").count() == 2)
        assert "costs $5 and $6; $z$" in chat.whole_answer()
        chat.say("And?")
        chat.until("the second answer", lambda: len(served.bodies[-1]["messages"]) == 3)
        assert served.bodies[-1]["messages"][1]["content"] == "Of $x^2$ and \\(y\\), costs $5 and $6; `$z$`"


def test_files_and_the_microphone_come_with_the_model_and_stop_with_all(browser: Any) -> None:
    with upstream([delta("Half"), threading.Event()], models=MANY) as many, page_of(many.url) as place:
        with opened(browser, place) as chat:
            upload, record = (
                chat.tab.get_by_role("button", name=name) for name in ("Upload", "Record audio")
            )
            for model, wanted in (("reads", (0, 0)), ("speaks", (1, 1)), ("sees", (1, 0)), ("reads", (0, 0))):
                chat.tab.get_by_label("Model").click()
                chat.tab.get_by_role("option", name=model).click()
                chat.until(model, lambda w=wanted: (upload.count(), record.count()) == w)
            chat.say("What?")
            chat.begun()
            chat.until("the stop button", chat.is_answering)
            chat.press_stop()
            chat.until("the stop", lambda: not chat.is_answering())
        assert many.left.wait(20)
