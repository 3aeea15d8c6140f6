"""What is measured, before it is opened: an engine, a checkpoint, random weights or Hugging Face's class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_files import CONFIG, read_json
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_SEQ_LEN
from ingot.config.decoder_config import DecoderConfig
from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.config.quantization.scheme_table import SCHEMES
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_facts import read_text_side
from ingot.engine.engine_loader import lowered
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest, is_engine
from ingot.errors import ConfigError
from ingot.models.model_registry import find_architecture
from ingot.text.tokenizer.tokenizer import Tokenizer

DTYPES = ("fp16", "bf16", "fp32")
INGOT, HUGGINGFACE = "ingot", "hf"
QWEN_NTK = "qwen_ntk"


@dataclass(frozen=True)
class SideSpec(JsonConfig):
    """What to open, and how.

    Attributes:
        path: engine, checkpoint, or Hugging Face id; None with ``random_weights``.
        kind: ``ingot``, or ``hf``: Hugging Face's class.
        dtype: of arithmetic; ``auto``: the model's own, fp32 on a CPU.
        quant: scheme of a checkpoint, or its YAML file; not for an engine or ``hf``.
        max_seq_len: None: an engine's, or a checkpoint's own, at most 8192.
        memory_fraction, token_budget, cache_tokens: for Ingot; None: the library's default.
        kv_dtype: of the KV cache, as in ``RuntimeConfig``; not for ``hf``.
        embedding: where it is kept, as in ``RuntimeConfig``; not for ``hf``.
        random_weights: a config.json or its folder, to fill with random weights.
        max_batch_size: requests in one step; for ``hf`` the rows of one padded batch; not for an engine.
        engine_batch_size: requests in one step of an engine; None: as many as it was built for.
        batch_invariant: a request's bits do not depend on the batch; not for ``hf``.
        prefix_reuse: reuse equal beginnings of prompts; not for ``hf``.
        name: in records and tables; None: its kind.
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
    embedding: str = "device"
    random_weights: str | None = None
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    engine_batch_size: int | None = None
    cache_tokens: int | None = None
    batch_invariant: bool = False
    prefix_reuse: bool = True
    name: str | None = None

    @property
    def title(self) -> str:
        return self.name or self.kind

    @property
    def source(self) -> str:
        assert self.path is not None, "random weights have no text to read"
        return self.path

    @property
    def is_engine(self) -> bool:
        return self.path is not None and is_engine(Path(self.path))

    def runtime(self) -> RuntimeConfig:
        names = ("memory_fraction", "token_budget", "cache_tokens", "batch_invariant", "prefix_reuse")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return RuntimeConfig(kv_dtype=self.kv_dtype, embedding=self.embedding, **values)  # type: ignore[arg-type]

    def config(self) -> DecoderConfig:
        """The model's config, without reading weights; an IngotError if that fails."""
        if self.random_weights is None:
            return model_of(self.source)
        path = Path(self.random_weights)
        return decoder_config(read_json(path / CONFIG if path.is_dir() else path))


def other_spec(spec: SideSpec, against: str, dtype: str, batch: int) -> SideSpec:
    """The spec of ``hf`` (in padded batches), ``hf:CHECKPOINT``, or an engine or checkpoint."""
    is_class, path = against_parts(against)
    plain = spec.replace(dtype=dtype, quant="none", kv_dtype="auto", embedding="device")
    if is_class:
        source = path or spec.path
        return plain.replace(path=source, kind=HUGGINGFACE, max_batch_size=batch, name="huggingface")
    most = None if is_engine(Path(against)) else spec.max_seq_len
    return plain.replace(path=against, max_seq_len=most, name="against" if spec.title == INGOT else INGOT)


def specs_with(spec: SideSpec, also: Sequence[str]) -> list[SideSpec]:
    """``spec`` and further sides, each with a name of its own. One of ``also`` is a dtype or scheme (or its
    YAML file) of the same checkpoint, or another engine or checkpoint: a folder that is there is a path.

    Raises:
        ConfigError: a precision of an engine, which has one, or that needs samples; the same side twice.
    """
    own = next((one for one in (spec.quant, spec.dtype) if one not in ("none", "auto")), spec.source)
    names, specs = [own], [spec]
    for given in also:
        precision = not Path(given).is_dir() and _precision(given)
        if precision and spec.is_engine:
            raise ConfigError(
                "an engine has one precision",
                seen=given,
                field="also",
                fix=f"`also` with an engine, or the checkpoint of {spec.source} in place of it",
            )
        most = None if is_engine(Path(given)) else spec.max_seq_len
        found: dict[str, Any] = precision or {"path": given, "quant": "none", "max_seq_len": most}
        names.append(given)
        specs.append(spec.replace(**found))
    lasts = [Path(os.path.abspath(name)).name for name in names]
    titles = [name if lasts.count(last) > 1 else last for name, last in zip(names, lasts, strict=True)]
    twice = [title for title in titles if titles.count(title) > 1]
    if twice:
        raise ConfigError("the same side is given twice", seen=twice[0], field="also")
    return [one.replace(name=title) for one, title in zip(specs, titles, strict=True)]


def _precision(given: str) -> dict[str, Any] | None:
    """The fields of a dtype or a scheme; None for anything else."""
    if given in DTYPES:
        return {"dtype": given, "quant": "none"}
    if given in SCHEMES or given.endswith((".yaml", ".yml")):
        _check_loads(given)
        return {"quant": given}
    return None


def _check_loads(given: str) -> None:
    """Refuse a scheme that no load can give, before any side is measured."""
    try:
        read_quant(given).check_in_memory()
    except ConfigError as error:
        what, fix = error.what.replace("`quant`", "`also`"), None if error.fields else error.fix
        raise ConfigError(what, seen=error.seen, allowed=error.allowed, field="also", fix=fix) from None


def named_apart(one: SideSpec, other: SideSpec) -> tuple[SideSpec, SideSpec]:
    """Two sides of one kind, named by the last parts of their paths, or if these are equal by their paths, or
    if these are equal too by counting.
    """
    if one.kind != other.kind:
        return one, other
    paths = [spec.path or spec.random_weights or "" for spec in (one, other)]
    counted = [f"{path}, {which}" for path, which in zip(paths, ("first", "second"), strict=True)]
    lasts = [Path(os.path.abspath(path)).name for path in paths]
    a, b = next(names for names in (lasts, paths, counted) if names[0] != names[1])
    return one.replace(name=a), other.replace(name=b)


def against_parts(against: str) -> tuple[bool, str | None]:
    """Whether ``against`` is Hugging Face's class, and its path: None for ``hf`` alone."""
    kind, colon, path = against.partition(":")
    if kind != HUGGINGFACE:
        return False, against
    if colon and not path:
        raise ConfigError(
            "hf: needs a checkpoint", seen=against, field="against", fix="`against=hf:CHECKPOINT`, or hf"
        )
    return True, path or None


def folder_of(path: str) -> Path:
    """An engine's folder, or that of a checkpoint or Hugging Face id; CheckpointError if nothing is there."""
    return Path(path) if is_engine(Path(path)) else resolve_checkpoint(path)


def model_of(path: str) -> DecoderConfig:
    """The model of an engine or checkpoint, without reading weights; an IngotError if that fails."""
    folder = folder_of(path)
    if is_engine(folder):
        return Manifest.read(folder).model
    if folder.is_file():  # OpenAI's, which has no config.json
        with open_checkpoint(folder) as source:
            return decoder_config(source.config)
    return decoder_config(read_json(folder / CONFIG))


def read_text(path: str) -> TextParts:
    """Tokenizer, chat format and end tokens of an engine or checkpoint; an IngotError if that fails."""
    return read_text_side(folder_of(path))[1]


def longest(spec: SideSpec) -> int:
    """Maximum tokens of a request, without reading weights."""
    folder = folder_of(spec.source)
    if is_engine(folder):
        return lowered(Manifest.read(folder), max_seq_len=spec.max_seq_len).build.max_seq_len
    return most_tokens(spec, model_of(spec.source))


def most_tokens(spec: SideSpec, config: DecoderConfig) -> int:
    """``longest`` of a checkpoint with this config."""
    most = config.max_positions
    if spec.kind == HUGGINGFACE:
        most = trained_length(config) or most  # beyond it Qwen v1 is no Qwen2
    return min(most, spec.max_seq_len or DEFAULT_MAX_SEQ_LEN)


def trained_length(config: DecoderConfig) -> int | None:
    """Qwen v1's training length; None for every other model."""
    rope = config.rope
    return rope.original_max if rope is not None and rope.scaling == QWEN_NTK else None


def usual_window(spec: SideSpec) -> int:
    """The default window: the longest request, but of Qwen v1 at most its training length, where Hugging
    Face's class ends, so that it is the same with and without that.
    """
    if spec.is_engine:
        trained = trained_length(Manifest.read(Path(spec.source)).model)
        return min(longest(spec), trained or longest(spec))
    return longest(spec.replace(kind=HUGGINGFACE))


def read_tokenizer(spec: SideSpec, without: str = "`mixed` or `fixed` instead of `requests`") -> Tokenizer:
    """The tokenizer of a spec's files; ``without`` is advice if there is none.

    Raises:
        ConfigError: there is none.
        TokenizerError, EngineError: its files are broken, or an engine's have changed since the build.
    """
    tokenizer = None if spec.path is None else read_text(spec.path).tokenizer
    if tokenizer is None:
        raise ConfigError(
            "counting the tokens of texts needs a tokenizer",
            seen=spec.path or spec.random_weights,
            field="text",
            fix=f"{without}, or an engine with a tokenizer",
        )
    return tokenizer


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """The config of a config.json.

    Raises:
        CheckpointError: its architecture is unknown, or a value is not supported.
    """
    return find_architecture(hf.get("architectures") or ()).read_config(hf)
