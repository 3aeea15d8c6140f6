"""What of the page's server is open: names, paths, uploads. Neither Gradio nor a browser."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ingot.adapters.web import page_access as doors
from ingot.adapters.web.page_access import DoorRules, Doors
from ingot.config.allowed_hosts import HostRule

PART = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\nP\r\n'
UPLOAD = "/gradio_api/upload"


class Page:
    """The application behind the doors: it reads every body to its end."""

    def __init__(self, rules: DoorRules) -> None:
        self.doors = Doors(self, rules)
        self.hold: asyncio.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = scope["method"] == "POST"
        while more:
            more = (await receive()).get("more_body", False)
        if self.hold is not None:
            await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None, parts: Any = (b"",)
    ) -> tuple[int, str]:
        sent: list[Any] = []
        left = list(parts)

        async def receive() -> Any:
            part = left.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(left)}

        async def send(message: Any) -> None:
            sent.append(message)

        size = str(sum(map(len, parts)))
        every = {"host": "127.0.0.1:7860", "content-length": size} | (headers or {})
        given = [(name.encode(), value.encode()) for name, value in every.items() if value]
        await self.doors({"type": "http", "method": method, "path": path, "headers": given}, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"]).get("detail", "")


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(DoorRules(HostRule.of("127.0.0.1"), takes_files=True, folder=tmp_path))


@pytest.mark.parametrize("path", ["/", "/config", "/gradio_api/queue/data", "/gradio_api/queue/join", UPLOAD])
async def test_other_names_and_pages_are_refused(page: Page, path: str) -> None:
    method = "POST" if path in ("/gradio_api/queue/join", UPLOAD) else "GET"
    for headers in ({"host": "evil.example:7860"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        assert (await page.ask(path, method, headers))[0] == 403
    for headers in ({}, {"host": "localhost:1"}, {"origin": "http://127.0.0.1:7860"}):
        assert (await page.ask(path, method, headers))[0] == 200


async def test_a_shared_page_answers_to_its_link(page: Page) -> None:
    link = {"host": "abc.gradio.live", "origin": "https://abc.gradio.live"}
    assert (await page.ask("/", headers=link))[0] == 403
    page.doors._rules.hosts = page.doors._rules.hosts.with_name("abc.gradio.live")
    assert (await page.ask("/", headers=link))[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/process_recording",
        "/gradio_api/component_server",
        "/gradio_api/vibe-edit",
        "/gradio_api/api/answer",
        "/gradio_api/stream/1",
        "/gradio_api/run/a/b",
        "/login",
        "/gradio_api/uploads",
    ],
)
async def test_only_what_the_page_asks_for_is_open(page: Page, path: str) -> None:
    assert (await page.ask(path, "POST"))[0] == 403
    assert (await page.ask("/gradio_api/queue/join", "PUT"))[0] == 403
    for open_one in ("queue/join", "run/predict", "cancel", "reset"):
        assert (await page.ask(f"/gradio_api/{open_one}", "POST"))[0] == 200


async def test_uploads_need_a_model_that_takes_them(page: Page) -> None:
    assert await page.ask(UPLOAD, "POST", parts=[PART]) == (200, "")
    page.doors._rules.takes_files = False
    assert await page.ask(UPLOAD, "POST", parts=[PART]) == (403, "no model of this server takes files")


async def test_an_upload_is_bounded(page: Page) -> None:
    most = str(doors.MOST_UPLOAD + (64 << 10))
    assert (await page.ask(UPLOAD, "POST", {"content-length": most}))[0] == 200
    assert (await page.ask(UPLOAD, "POST", {"content-length": str(int(most) + 1)}))[0] == 413
    for length in ("", "x", "-1"):
        assert (await page.ask(UPLOAD, "POST", {"content-length": length}))[0] == 411
    data = PART * doors.MOST_FILES
    for size in (7, 1000):
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert (await page.ask(UPLOAD, "POST", parts=parts))[0] == 200
        assert (await page.ask(UPLOAD, "POST", parts=[*parts, PART]))[0] == 413


async def test_uploads_at_once_are_bounded(page: Page) -> None:
    page.hold = asyncio.Event()
    running = [asyncio.ensure_future(page.ask(UPLOAD, "POST")) for _ in range(doors.MOST_UPLOADS)]
    await asyncio.sleep(0.01)
    assert (await page.ask(UPLOAD, "POST"))[0] == 429
    page.hold.set()
    assert [status for status, _ in await asyncio.gather(*running)] == [200] * doors.MOST_UPLOADS
    assert (await page.ask(UPLOAD, "POST"))[0] == 200


@pytest.mark.parametrize("bound", ["MOST_KEPT_BYTES", "MOST_KEPT_FILES"])
async def test_what_is_kept_is_bounded(
    bound: str, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, bound, 3)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"1")
    assert (await page.ask(UPLOAD, "POST"))[0] == 200
    (tmp_path / "c").write_bytes(b"1")
    assert (await page.ask(UPLOAD, "POST"))[0] == 507


async def test_there_is_no_web_socket(page: Page) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"localhost")]}
    await page.doors(scope, None, send)
    assert sent == ["websocket.close"]
