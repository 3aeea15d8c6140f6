"""The arguments of the Ray application in a YAML file; imports no Ray, so they are checked anywhere."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ingot.config.json_config import JsonConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.server_config import ServeConfig
from ingot.errors import ConfigError
from ingot.serve.engine_calls.process_protocol import LoadEngine


@dataclass(frozen=True)
class EngineArgs(JsonConfig):
    """One engine.

    Attributes:
        path: an engine's or a checkpoint's folder, on every machine that gets a replica.
        name: what clients call it, and the name of its deployment; None: the folder's.
        device, threads, max_batch_size, max_seq_len, runtime: as the flags of ``ingot serve``.
        unproven: serve it without a proof.
    """

    path: str
    name: str | None = None
    device: str | None = None
    threads: int | None = None
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    unproven: bool = False

    @property
    def shown(self) -> str:
        """The name that clients use."""
        return self.name or Path(self.path).resolve().name

    def load(self) -> LoadEngine:
        sizes = self.max_batch_size, self.max_seq_len
        return LoadEngine(
            os.path.abspath(self.path), self.device, self.threads, *sizes, self.runtime.to_json()
        )


@dataclass(frozen=True)
class RayArgs(JsonConfig):
    """The application.

    Attributes:
        engines: one deployment each.
        max_queue, max_body: of each replica, as the flags of ``ingot serve``.
        prefix_bytes: how much of a prompt's JSON decides the replica; about four bytes are a token.
        most_ahead: a replica with this many requests more than the idlest one is passed over, whatever it has
            cached.

    Raises:
        ConfigError: a value is out of range.
    """

    engines: tuple[EngineArgs, ...]
    max_queue: int = ServeConfig.max_queue
    max_body: int = ServeConfig.max_body
    prefix_bytes: int = 1024
    most_ahead: int = 8

    def __post_init__(self) -> None:
        names = [engine.shown for engine in self.engines]
        if not names or len(set(names)) != len(names):
            raise ConfigError("engines: name at least one, each once", seen=names, fix="give each a `name`")
        for name in ("prefix_bytes", "most_ahead"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is too small", seen=getattr(self, name), allowed=">= 1")
        self.serve_config()

    def serve_config(self) -> ServeConfig:
        return ServeConfig(max_queue=self.max_queue, max_body=self.max_body)
