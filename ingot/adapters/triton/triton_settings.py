"""The parameters of a model's config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ingot.config.runtime_config import RuntimeConfig
from ingot.config.server_config import ServeConfig
from ingot.errors import ConfigError
from ingot.serve.engine_calls.process_protocol import LoadEngine

_RUNTIME = ("memory_fraction", "cache_tokens", "token_budget", "kv_dtype", "embedding", "batch_invariant")
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class Settings:
    """What config.pbtxt says of an engine; None: as the library has it.

    Attributes:
        engine: its folder; a relative path begins at the version's folder, where model.py is.
        unproven: load it without a proof.
        threads: of PyTorch on a CPU.
        max_queue: answers that may wait beside a full batch; more are refused.

    Raises:
        ConfigError: a value is out of range.
    """

    engine: str
    unproven: bool = False
    max_queue: int | None = None
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    memory_fraction: float | None = None
    cache_tokens: int | None = None
    token_budget: int | None = None
    kv_dtype: str | None = None
    embedding: str | None = None
    batch_invariant: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        self.serve_config()
        RuntimeConfig(**self._runtime())
        for name in ("max_batch_size", "max_seq_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is too small", seen=value, allowed=">= 1", field=name)

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Settings:
        """Settings from config.pbtxt's parameters; names in capitals are Triton's own. Raises ConfigError
        where a name is unknown or missing, or a value is of the wrong type or out of range.
        """
        types = {field.name: str(field.type).partition(" ")[0] for field in fields(cls)}
        own = {name: text for name, text in parameters.items() if not name.isupper()}
        for name in own:
            if name not in types:
                raise ConfigError("unknown parameter in config.pbtxt", seen=name, allowed=", ".join(types))
        if not own.get("engine"):
            raise ConfigError("config.pbtxt names no engine", fix="the parameter engine")
        return cls(**{name: _value(name, types[name], text) for name, text in own.items()})

    def parameters(self) -> dict[str, str | None]:
        """As config.pbtxt has them; None: not given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: v if v is None or isinstance(v, str) else str(v).lower() for n, v in given.items()}

    def folder(self, version: Path) -> Path:
        return version / self.engine

    def serve_config(self) -> ServeConfig:
        return ServeConfig() if self.max_queue is None else ServeConfig(max_queue=self.max_queue)

    def load(self, device: str, version: Path) -> LoadEngine:
        return LoadEngine(
            str(self.folder(version).resolve()),
            device=device,
            threads=self.threads,
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            runtime=self._runtime(),
        )

    def _runtime(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _RUNTIME}
        return {name: value for name, value in values.items() if value is not None}


def _value(name: str, kind: str, text: str) -> Any:
    try:
        return {"int": int, "float": float, "bool": _WORDS.__getitem__, "str": str}[kind](text)  # type: ignore[operator]
    except (KeyError, ValueError):
        allowed = {"int": "an integer", "float": "a number", "bool": "true or false"}[kind]
        raise ConfigError(f"config.pbtxt: {name} cannot be read", seen=repr(text), allowed=allowed) from None
