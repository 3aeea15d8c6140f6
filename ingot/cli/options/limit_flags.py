"""Flags for memory and limits that the verbs which run an engine share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from ingot.cli.options.flags import given, option
from ingot.config.build_config import DEFAULT_MAX_SEQ_LEN

PANEL = "Memory and limits"


def memory_fraction(panel: str) -> Any:
    text = "Fraction of GPU memory, or of available CPU memory, to use."
    return option(text, shown="0.9", panel=panel, min=0.01, max=1.0)


def cache_tokens(panel: str, shown: str) -> Any:
    return option("KV cache size, in tokens.", shown=shown, panel=panel, min=1)


def token_budget(panel: str) -> Any:
    return option("Maximum tokens per step.", shown="2048", panel=panel, min=1)


def max_seq_len(least: int) -> Any:
    text = "Maximum tokens per request; for an engine, up to its own limit."
    shown = f"as built, or the model's up to {DEFAULT_MAX_SEQ_LEN}"
    return option(text, shown=shown, panel=PANEL, min=least)


_CACHE = "a full batch of the longest requests, or what fits; on a CPU at most 256 MiB"
_STEP = "Maximum requests per step, up to the engine's own limit."
_LENGTH = "Maximum tokens per request, prompt plus output, up to the engine's own limit."
_INVARIANT = (
    "Make each answer bitwise independent of the other requests in the batch; slower (docs/numerics.md)."
)
_KV_DTYPE = (
    "Dtype of the KV cache: int8 or fp8 (half the bytes of 16 bits, at some cost in quality), model (the "
    "compute dtype), or auto: as built."
)
_EMBEDDING = (
    "Where the token embedding stays: device, or host: in pinned memory that the GPU reads, with the same "
    "answers (docs/memory.md)."
)
MemoryFraction = Annotated[float | None, memory_fraction(PANEL)]
CacheTokens = Annotated[int | None, cache_tokens(PANEL, _CACHE)]
TokenBudget = Annotated[int | None, token_budget(PANEL)]
MaxBatchSize = Annotated[int | None, option(_STEP, shown="as built", panel=PANEL, min=1)]
MaxSeqLen = Annotated[int | None, option(_LENGTH, shown="as built", panel=PANEL, min=1)]
BatchInvariant = Annotated[bool, option(_INVARIANT, "--batch-invariant", panel=PANEL)]
KvDtype = Annotated[str | None, option(_KV_DTYPE, shown="auto", panel=PANEL, metavar="auto|model|int8|fp8")]
Embedding = Annotated[str | None, option(_EMBEDDING, shown="device", panel=PANEL, metavar="device|host")]


@dataclass(frozen=True)
class Limits:
    """An engine's memory and limits; None: the library's default."""

    memory_fraction: MemoryFraction = None
    cache_tokens: CacheTokens = None
    token_budget: TokenBudget = None
    max_batch_size: MaxBatchSize = None
    max_seq_len: MaxSeqLen = None
    kv_dtype: KvDtype = None
    embedding: Embedding = None
    batch_invariant: BatchInvariant = False

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``LLM`` that were given."""
        from ingot.config.runtime_config import RuntimeConfig

        runtime = runtime_values(self)
        config = RuntimeConfig(**runtime) if runtime else None
        return given(max_batch_size=self.max_batch_size, max_seq_len=self.max_seq_len, runtime=config)

    def words(self) -> list[str]:
        """The given flags as words of a command line."""
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value is not False:
                words.append("--" + field.name.replace("_", "-"))
                words += [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]
        return words


def runtime_values(flags: Any) -> dict[str, Any]:
    """The fields of ``RuntimeConfig`` that the flags give."""
    names = ("memory_fraction", "cache_tokens", "token_budget", "kv_dtype", "embedding", "batch_invariant")
    values = {name: getattr(flags, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}
