"""``ingot web``: the chat page of a server that runs elsewhere; ``serve --web`` shares its flags."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ingot.cli.opening import check_key
from ingot.cli.options.flags import field_flags, given_of, option
from ingot.cli.terminal.console import stderr
from ingot.config.server_config import WebConfig

PANEL = "Page"
_SHARE = "Open a tunnel through Gradio's servers: anybody with its link can use the page, without a key."
_URL = "OpenAI-compatible server that the page asks."
_HOSTS = "Name by which readers may reach the page beside localhost; may be repeated."
_KEY = "The server's key; the page never shows it."


@dataclass(frozen=True)
class PageFlags:
    """Fields of ``WebConfig``; None: its default."""

    web_port: Annotated[
        int | None, option("Port of the page.", shown="7860", panel=PANEL, min=1, max=65535)
    ] = None
    server_name: Annotated[
        str | None,
        option("Address that the page listens on; 0.0.0.0: all.", shown="127.0.0.1", panel=PANEL),
    ] = None
    share: Annotated[bool, option(_SHARE, "--share", panel=PANEL)] = False
    inbrowser: Annotated[bool, option("Open the page in the browser.", "--inbrowser", panel=PANEL)] = False

    def config(self, url: str, hosts: Sequence[str]) -> WebConfig:
        """For the page of this server; ``hosts``: names that it answers to beside its address."""
        return WebConfig(url, allowed_host=tuple(hosts), **given_of(self))


@field_flags("page")
def web(
    page: PageFlags,
    url: Annotated[str, option(_URL, panel=PANEL)] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, option(_KEY, shown="none", panel=PANEL, envvar="INGOT_API_KEY", show_envvar=True)
    ] = None,
    allowed_host: Annotated[list[str] | None, option(_HOSTS, shown="none", panel=PANEL)] = None,
) -> None:
    """Serve a chat page for any OpenAI-compatible server (needs the extra `web`).

    Whoever reaches the page can use the server, also where the server has a key.
    """
    check_key(api_key)
    from ingot.adapters.web.page_process import launched, started_text

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with launched(page.config(url, allowed_host or ()), api_key) as urls:
        stderr().print(started_text(urls), markup=False)
        ended.wait()
