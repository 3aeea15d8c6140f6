"""The page as a running program, in this process or in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ingot.adapters.web.page_access import MOST_UPLOAD, DoorRules, Doors
from ingot.config.allowed_hosts import HostRule
from ingot.config.server_config import WebConfig
from ingot.errors import ConfigError, EngineError, IngotError, to_install

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ingot.adapters.web.page_process import main; sys.exit(main())"
)
_ROOT = str(Path(__file__).parents[3])
_END_SECONDS = 5.0
_QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_LOCAL = "127.0.0.1,localhost,::1"  # is asked without a proxy
_POLICY = (
    "default-src 'self' 'unsafe-inline' data: blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'self'"
)
_log = logging.getLogger(__name__)


def check_page(config: WebConfig) -> None:
    """Say early what would keep the page from starting.

    Raises:
        EngineError: Gradio is not installed.
        ConfigError: the address is taken.
    """
    if importlib.util.find_spec("gradio") is None:
        raise EngineError("the page needs Gradio, which is not installed", fix=to_install("web"))
    try:
        family, kind, _, _, address = _address(config)
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        seen = f"{config.server_name}:{config.web_port}: {error.strerror or error}"
        raise ConfigError("the page cannot listen", seen=seen, field=("server_name", "web_port")) from None


def _address(config: WebConfig) -> tuple[Any, ...]:
    return socket.getaddrinfo(config.server_name, config.web_port, type=socket.SOCK_STREAM)[0]


@contextlib.contextmanager
def launched(config: WebConfig, key: str | None) -> Iterator[list[str]]:
    """The page while the block is open; gives its URLs, the shared one last.

    Raises:
        ConfigError, EngineError: it cannot start.
    """
    check_page(config)
    # Gradio and what it imports read these; they would ask for updates and count their users.
    os.environ.update(_QUIET)
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), _LOCAL)))
    with tempfile.TemporaryDirectory(prefix="ingot-page-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # which Gradio reads when it is imported, and for each upload
        import gradio as gr

        from ingot.adapters.web.page import HEAD, make_page
        from ingot.adapters.web.page_client import AnswerError, Api

        async def inputs() -> frozenset[str]:
            async with Api(config.base, key) as asked:
                return frozenset[str]().union(*(model.inputs for model in await asked.models()))

        try:
            found = asyncio.run(inputs())
        except AnswerError:  # the page says so; it has no files then
            found = frozenset()
        hosts = HostRule.of(str(_address(config)[4][0]), config.allowed_host)
        rules = DoorRules(hosts, takes_files=bool(found), folder=Path(folder))
        fonts = ["system-ui", "sans-serif"]
        page = make_page(Api(config.base, key), found)
        _, local, shared = page.launch(
            server_name=config.server_name,
            server_port=config.web_port,
            share=config.share,
            inbrowser=config.inbrowser,
            theme=gr.themes.Default(font=fonts, font_mono=["ui-monospace", "monospace"]),
            app_kwargs={"middleware": [(_Policy, (), {}), (Doors, (rules,), {})]},
            head=HEAD,
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            max_file_size=MOST_UPLOAD,
            quiet=True,
            prevent_thread_lock=True,
        )
        if shared:
            rules.hosts = hosts.with_name(urlsplit(shared).hostname or "")
        try:
            yield [url for url in (local, shared) if url]
        finally:
            page.close(verbose=False)


class _Policy:
    """Tells browsers to load nothing from elsewhere, whatever an answer links to."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", _POLICY.encode())
                message = {
                    **message,
                    "headers": [*message["headers"], policy, (b"referrer-policy", b"no-referrer")],
                }
            await send(message)

        await self._app(scope, receive, sent)


class PageProcess:
    """The page in a process of its own, which ends with this one.

    It receives its settings and the key through a pipe, so that no list of processes shows the key.
    """

    def __init__(self, config: WebConfig, key: str | None) -> None:
        path = [os.path.abspath(entry) for entry in sys.path] + [_ROOT]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=2,  # what libraries print is no data
            start_new_session=True,  # Ctrl-C is the server's: answers may end first
            text=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        self._pipe.write(json.dumps({"config": config.to_json(), "key": key}) + "\n")
        self._pipe.flush()
        self._closing = False
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._closing:
            _log.error("the page's process has ended (exit code %s); the server goes on", code)


def main(read_line: Callable[[], str] = sys.stdin.readline) -> int:
    """The page's process: its first line of input is its settings; the end of input ends it."""
    facts = json.loads(read_line())
    try:
        with launched(WebConfig.from_json(facts["config"]), facts["key"]) as urls:
            print(started_text(urls), file=sys.stderr, flush=True)
            while read_line():
                continue
    except IngotError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def started_text(urls: list[str]) -> str:
    local, *shared = urls
    text = f"the page is on {local.rstrip('/')}"
    return f"{text} and, for anybody who has the link, on {shared[0]}" if shared else text
