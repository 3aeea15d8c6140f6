"""``ingot web``: the chat page of a server that runs elsewhere."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

from ingot.cli.options.flags import field_flags, option
from ingot.cli.options.page_flags import PANEL, PageFlags
from ingot.cli.serve import check_key
from ingot.cli.terminal.console import stderr

_URL = "OpenAI-compatible server that the page asks."
_HOSTS = "Name by which readers may reach the page beside localhost; may be repeated."
_KEY = "The server's key; the page never shows it."


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
