"""The flags that the verbs of ``ingot bench`` share.

Covers their names, help and defaults.

    @field_flags("flags")
    def kernels(flags: ModelFlags) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ingot.cli.options.flags import AsJson, Device, JsonFile, NewTokens, PromptTokens, Quant, Threads, option
from ingot.cli.options.limit_flags import (
    PANEL,
    BatchInvariant,
    CacheTokens,
    KvDtype,
    MemoryFraction,
    TokenBudget,
)
from ingot.config.build_config import DEFAULT_MAX_SEQ_LEN

BATCHES = "1,8,32,64"

Batch = Annotated[str, option("Batch sizes, separated by commas.")]
EngineOrCheckpoint = typer.Argument(
    help="An engine folder, a checkpoint folder or a Hugging Face id.",
    metavar="ENGINE_OR_CHECKPOINT",
    show_default=False,
)
RandomWeights = Annotated[
    str | None, option("A config.json (or its folder), run with random weights instead of an engine.")
]
Dtype = Annotated[str, option("Compute dtype: fp16, bf16, fp32, or auto: the model's, fp32 on a CPU.")]
_LENGTH = "Maximum tokens per request; for an engine, up to its own limit."
_BATCH = "Maximum requests per step; for an engine, up to its own limit."
_AGAINST = (
    "What to compare with: hf (the Hugging Face class on the same weights), hf:CHECKPOINT, or another "
    "engine or checkpoint."
)


def max_seq_len(least: int) -> Any:
    """The flag of this name."""
    shown = f"as built, or the model's up to {DEFAULT_MAX_SEQ_LEN}"
    return option(_LENGTH, shown=shown, panel=PANEL, min=least)


@dataclass(frozen=True)
class ModelFlags:
    """What is measured, on what, at which lengths."""

    engine: Annotated[str | None, EngineOrCheckpoint] = None
    random_weights: RandomWeights = None
    prompt_tokens: PromptTokens = 512
    new_tokens: NewTokens = 128
    as_json: AsJson = False
    json_file: JsonFile = None
    max_seq_len: Annotated[int | None, max_seq_len(1)] = None
    dtype: Dtype = "auto"
    device: Device = None


@dataclass(frozen=True)
class SideFlags(ModelFlags):
    """And how it runs, beside what."""

    against: Annotated[str | None, option(_AGAINST, metavar="hf|CHECKPOINT")] = None
    quant: Quant = None
    max_batch_size: Annotated[
        int | None, option(_BATCH, shown="as built, or as needed", panel=PANEL, min=1)
    ] = None
    memory_fraction: MemoryFraction = None
    cache_tokens: CacheTokens = None
    token_budget: TokenBudget = None
    kv_dtype: KvDtype = None
    threads: Threads = None
    batch_invariant: BatchInvariant = False


@dataclass(frozen=True)
class ClipFlags:
    """Which clips are transcribed by what, beside what."""

    engine: Annotated[str | None, EngineOrCheckpoint] = None
    random_weights: RandomWeights = None
    clips: Annotated[int, option("Clips, with LibriSpeech's distribution of lengths.", min=1)] = 73
    batch: Annotated[str, option("Clips at once, separated by commas; 1: one after another.")] = "1,64"
    against: Annotated[str | None, option(_AGAINST, metavar="hf|CHECKPOINT")] = None
    repeats: Annotated[int, option("Timed runs of each batch size.", min=1)] = 3
    tokens_per_second: Annotated[float, option("Tokens per second of audio, whatever the weights say.")] = 4.0
    as_json: AsJson = False
    json_file: JsonFile = None
    dtype: Dtype = "auto"
    quant: Quant = None
    max_seq_len: Annotated[int | None, max_seq_len(1)] = None
    memory_fraction: MemoryFraction = None
    kv_dtype: KvDtype = None
    device: Device = None
    threads: Threads = None


@dataclass(frozen=True)
class BenchCaptionFlags:
    """How many pictures are asked about, by what, beside what."""

    engine: Annotated[str | None, EngineOrCheckpoint] = None
    random_weights: RandomWeights = None
    pictures: Annotated[int, option("Pictures, each of its own.", min=1)] = 40
    batch: Annotated[str, option("Pictures at once, separated by commas; 1: one after another.")] = "1,40"
    prompt_tokens: Annotated[int, option("Text tokens around each picture.", min=1)] = 141
    new_tokens: Annotated[int, option("Tokens generated per picture.", min=1)] = 80
    against: Annotated[str | None, option("Another engine or checkpoint.", metavar="ENGINE")] = None
    repeats: Annotated[int, option("Timed runs of each batch size.", min=1)] = 3
    as_json: AsJson = False
    json_file: JsonFile = None
    dtype: Dtype = "auto"
    quant: Quant = None
    max_seq_len: Annotated[int | None, max_seq_len(1)] = None
    memory_fraction: MemoryFraction = None
    kv_dtype: KvDtype = None
    device: Device = None
    threads: Threads = None
