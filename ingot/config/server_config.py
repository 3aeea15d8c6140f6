"""How a server listens, and what it refuses.

Covers the limits of ``ingot serve`` and their ranges.

    ServeConfig(port=0, max_queue=16)
"""

from __future__ import annotations

from dataclasses import dataclass

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
        allowed_host: names that it answers to beside those of its address (``HostRule``).
        private_prefixes: only requests of one ``cache_salt`` share a prompt's beginning in the cache.
        closed_objects: objects of a JSON schema have no other properties than those it names.
        max_queue: answers that may wait beside a full batch, per engine; more are refused with 429.
        max_body: bytes of a request's body.
        max_audio: bytes of a recording, as it is sent.
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
