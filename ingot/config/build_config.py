"""The limits and dtypes that a user asks of a build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from ingot.config.half_dtypes import HalfDtypes
from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError

MANIFEST_FILE = "manifest.json"  # in a folder without config.json: an engine, not a checkpoint
DEFAULT_MAX_BATCH_SIZE = 64
DEFAULT_MAX_SEQ_LEN = 8192
NARROW_KV_DTYPES = ("int8", "fp8")  # a KV cache in 8 bits
BUILT_KV_DTYPES = ("model", *NARROW_KV_DTYPES)
Layers = tuple[int, int] | None


@dataclass(frozen=True)
class BuildConfig(JsonConfig):
    """Limits and dtypes of an engine.

    ``dtype`` is of the weights; ``encoder_dtype`` of an encoder's, where they have another (None: ``dtype``).
    ``max_seq_len`` counts prompt and output. ``layers`` keeps only the decoder layers [start, end), to
    inspect a part of a model. ``kv_dtype`` is the KV cache's default at run time: ``model`` is ``dtype``;
    ``int8`` and ``fp8`` have scales.
    """

    dtype: Literal["fp16", "bf16", "fp32"]
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    max_seq_len: int = DEFAULT_MAX_SEQ_LEN
    layers: tuple[int, ...] | None = None
    kv_dtype: Literal["model", "int8", "fp8"] = "model"
    encoder_dtype: Literal["fp16", "bf16", "fp32"] | None = None

    def __post_init__(self) -> None:
        for dtype in (self.dtype, self.dtype if self.encoder_dtype is None else self.encoder_dtype):
            if dtype not in ("fp16", "bf16", "fp32"):
                raise ConfigError("unknown dtype", seen=dtype, allowed="fp16, bf16, fp32", field="dtype")
        if self.kv_dtype not in BUILT_KV_DTYPES:
            raise ConfigError(
                "unknown kv_dtype", seen=self.kv_dtype, allowed=", ".join(BUILT_KV_DTYPES), field="kv_dtype"
            )
        for name in ("max_batch_size", "max_seq_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer >= 1", seen=value, field=name)
        if self.layers is not None and (len(self.layers) != 2 or not 0 <= self.layers[0] < self.layers[1]):
            raise ConfigError(
                "layers must be START:END", seen=self.layers, allowed="0 <= START < END", field="layers"
            )

    @classmethod
    def of(cls, dtypes: HalfDtypes, max_batch_size: int, max_seq_len: int, layers: Layers = None) -> Self:
        """A config of these dtypes and limits."""
        limits = (max_batch_size, max_seq_len, layers)
        return cls(dtypes.decoder, *limits, encoder_dtype=dtypes.other)  # type: ignore[arg-type]

    @property
    def dtypes(self) -> HalfDtypes:
        """Of the weights of both halves."""
        return HalfDtypes.of(self.dtype, self.encoder_dtype)


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """``"0:1"`` → (0, 1); None stays None. Raises ``ConfigError`` if the text is not START:END."""
    if text is None:
        return None
    start, colon, end = text.partition(":")
    if not colon or not start.isdigit() or not end.isdigit():
        raise ConfigError("layers must be START:END", seen=text, allowed="for example 0:1", field="layers")
    return int(start), int(end)
