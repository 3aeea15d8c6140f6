"""Where the chat page listens, and which server it asks.

Covers the fields of ``ingot web`` and their ranges.

    WebConfig("http://127.0.0.1:8000", web_port=7861)
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ingot.config.allowed_hosts import check_names
from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError

_MOST_PORT = 65535


@dataclass(frozen=True)
class WebConfig(JsonConfig):
    """Address of the page and of its server.

    Attributes:
        url: of an OpenAI-compatible server, with or without ``/v1``.
        server_name, web_port: where the page listens.
        allowed_host: names that the page answers to beside those of its address (``HostRule``).
        share: open a tunnel through Gradio's servers, so that anybody with the link can use the page.
        inbrowser: open the page in this machine's browser.

    Raises:
        ConfigError: a value is out of range; it names the field.
    """

    url: str
    server_name: str = "127.0.0.1"
    web_port: int = 7860
    allowed_host: tuple[str, ...] = ()
    share: bool = False
    inbrowser: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_host", check_names(self.allowed_host))
        if not 1 <= self.web_port <= _MOST_PORT:
            raise ConfigError(
                "the page's port is out of range",
                seen=self.web_port,
                allowed=f"1 to {_MOST_PORT}",
                field="web_port",
            )
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            valid = False
        if not valid:
            raise ConfigError(
                "the URL of a server is needed", seen=self.url, allowed="http://127.0.0.1:8000", field="url"
            )

    @property
    def base(self) -> str:
        """The URL that ``/v1/…`` is put behind."""
        return self.url.rstrip("/").removesuffix("/v1")
