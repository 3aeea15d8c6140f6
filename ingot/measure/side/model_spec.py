"""How a model is opened that another is compared with, and what is known of it before its weights are read.

Owns the description of an engine, a checkpoint or Hugging Face's class, the words of ``--against``, the
longest request and the text. Opens nothing.

    is_class, path = against_parts("hf:checkpoint")
    longest(ModelSpec("engines/pocket-chat"))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_files import CONFIG, read_json
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.build_config import DEFAULT_MAX_SEQ_LEN
from ingot.config.decoder_config import DecoderConfig
from ingot.config.json_config import JsonConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_facts import read_text_side
from ingot.engine.engine_loader import lowered
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest, is_engine
from ingot.errors import ConfigError
from ingot.models.model_registry import find_architecture

INGOT, HUGGINGFACE = "ingot", "hf"
QWEN_NTK = "qwen_ntk"


@dataclass(frozen=True)
class ModelSpec(JsonConfig):
    """What to open, and how.

    Attributes:
        path: engine, checkpoint, or Hugging Face id.
        kind: ``ingot``, or ``hf``: Hugging Face's class.
        dtype: of arithmetic; ``auto``: the model's own, fp32 on a CPU.
        quant: scheme that a checkpoint is loaded in, or a YAML file of one; not for an engine or ``hf``.
        max_seq_len: None: an engine's, or a checkpoint's own, at most 8192.
        memory_fraction, token_budget: for Ingot; None: the library's default.
        kv_dtype: of the KV cache, as in ``RuntimeConfig``; not for ``hf``.
    """

    path: str | None = None
    kind: str = INGOT
    device: str = "auto"
    dtype: str = "auto"
    quant: str = "none"
    max_seq_len: int | None = None
    memory_fraction: float | None = None
    token_budget: int | None = None
    kv_dtype: str = "auto"

    def runtime(self, **more: Any) -> RuntimeConfig:
        """What the spec and ``more`` ask of the runtime; None: the library's default."""
        asked = {"memory_fraction": self.memory_fraction, "token_budget": self.token_budget, **more}
        values = {name: value for name, value in asked.items() if value is not None}
        return RuntimeConfig(kv_dtype=self.kv_dtype, **values)  # type: ignore[arg-type]


def against_parts(against: str) -> tuple[bool, str | None]:
    """Whether ``--against`` means Hugging Face's class, and the path that it names: None for ``hf`` alone.

    Raises:
        ConfigError: ``hf:`` without a checkpoint.
    """
    kind, colon, path = against.partition(":")
    if kind != HUGGINGFACE:
        return False, against
    if colon and not path:
        raise ConfigError("hf: needs a checkpoint", seen=against, flag="--against hf:CHECKPOINT, or hf")
    return True, path or None


def folder_of(path: str) -> Path:
    """An engine's folder, or that of a checkpoint or Hugging Face id.

    Raises:
        CheckpointError: nothing is there.
    """
    return Path(path) if is_engine(Path(path)) else resolve_checkpoint(path)


def model_of(path: str) -> DecoderConfig:
    """The model of an engine or checkpoint, without its weights.

    Raises:
        IngotError: nothing is there, or it cannot be read.
    """
    folder = folder_of(path)
    if is_engine(folder):
        return Manifest.read(folder).model
    if folder.is_file():  # OpenAI's, which has no config.json
        with open_checkpoint(folder) as source:
            return decoder_config(source.config)
    return decoder_config(read_json(folder / CONFIG))


def read_text(path: str) -> TextParts:
    """Tokenizer, chat format and end tokens of an engine or checkpoint, without its weights.

    Raises:
        IngotError: nothing is there, or its tokenizer is broken.
    """
    return read_text_side(folder_of(path))[1]


def longest(spec: ModelSpec) -> int:
    """Most tokens of a request, without reading weights.

    Raises:
        IngotError: neither an engine nor a checkpoint is there.
    """
    assert spec.path is not None, "random weights have no text to read"
    folder = folder_of(spec.path)
    if is_engine(folder):
        return lowered(Manifest.read(folder), max_seq_len=spec.max_seq_len).build.max_seq_len
    return most_tokens(spec, model_of(spec.path))


def most_tokens(spec: ModelSpec, config: DecoderConfig) -> int:
    """``longest`` of a checkpoint with this config."""
    most = config.max_positions
    if spec.kind == HUGGINGFACE:
        most = trained_length(config) or most  # beyond it Qwen v1 is no Qwen2
    return min(most, spec.max_seq_len or DEFAULT_MAX_SEQ_LEN)


def trained_length(config: DecoderConfig) -> int | None:
    """Tokens up to which Qwen v1 is what it was trained as; None for every other model."""
    rope = config.rope
    return rope.original_max if rope is not None and rope.scaling == QWEN_NTK else None


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """What a config.json says, as Ingot reads it.

    Raises:
        CheckpointError: its architecture is unknown, or a value is not supported.
    """
    return find_architecture(hf.get("architectures") or ()).read_config(hf)
