"""The flags of the chat page, which ``serve --web`` and ``web`` share.

Covers their names and help. Defaults are ``WebConfig``'s.

    @field_flags("page")
    def web(url: str, page: PageFlags) -> None: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ingot.cli.options.flags import given_of, option
from ingot.config.page_config import WebConfig

PANEL = "Page"
_SHARE = "Open a tunnel through Gradio's servers: anybody with its link can use the page, without a key."


@dataclass(frozen=True)
class PageFlags:
    """Fields of ``WebConfig``; None: as the library has it."""

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
        """Of the page of this server; ``hosts``: names that it answers to beside its address."""
        return WebConfig(url, allowed_host=tuple(hosts), **given_of(self))
