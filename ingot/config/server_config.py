"""Addresses and limits of ``ingot serve`` and of the chat page, ``ingot web``."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ingot.config.allowed_hosts import check_names
from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError

_MOST_PORT = 65535
_LEAST = {
    "max_queue": 0,
    "max_body": 1024,
    "max_audio": 1024,
    "max_audio_seconds": 1,
    "max_unread": 1,
    "drain_seconds": 0,
}


@dataclass(frozen=True)
class ServeConfig(JsonConfig):
    """Address and limits of a server.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        allowed_host: names that it answers to besides those of its address (``HostRule``).
        private_prefixes: only requests of one ``cache_salt`` share a prompt's prefix in the cache.
        closed_objects: objects of a JSON schema have only the properties that it names.
        max_queue: answers that may wait for a full batch, per engine; more are refused with 429.
        max_body: bytes of a request's body.
        max_audio: bytes of a recording, as sent.
        max_audio_seconds: of a recording.
        max_unread: pieces of a stream that a client may leave unread before its request is ended.
        drain_seconds: how long unfinished answers may go on after SIGTERM.

    Raises:
        ConfigError: a value is out of range; it names the field.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_host: tuple[str, ...] = ()
    private_prefixes: bool = False
    closed_objects: bool = False
    max_queue: int = 256
    max_body: int = 8 << 20
    max_audio: int = 25 << 20
    max_audio_seconds: float = 2 * 3600.0
    max_unread: int = 4096
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_host", check_names(self.allowed_host))
        if not 0 <= self.port <= _MOST_PORT:
            raise ConfigError(
                "port is out of range", seen=self.port, allowed=f"0 to {_MOST_PORT}", field="port"
            )
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ConfigError(
                    f"{name} is too small", seen=getattr(self, name), allowed=f">= {least}", field=name
                )


@dataclass(frozen=True)
class WebConfig(JsonConfig):
    """Address of the chat page and of its server.

    Attributes:
        url: of an OpenAI-compatible server, with or without ``/v1``.
        server_name, web_port: where the page listens.
        allowed_host: names that the page answers to besides those of its address (``HostRule``).
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
            what, allowed = "the page's port is out of range", f"1 to {_MOST_PORT}"
            raise ConfigError(what, seen=self.web_port, allowed=allowed, field="web_port")
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            valid = False
        if not valid:
            what, allowed = "the URL of a server is needed", "http://127.0.0.1:8000"
            raise ConfigError(what, seen=self.url, allowed=allowed, field="url")

    @property
    def base(self) -> str:
        """The URL to which ``/v1/…`` is appended."""
        return self.url.rstrip("/").removesuffix("/v1")
