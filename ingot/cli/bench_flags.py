"""The flags that the verbs of ``ingot bench`` share.

Owns their names, help and defaults. Knows no measurement.

    @field_flags("flags")
    def kernels(flags: ModelFlags) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ingot.cli.flags import AsJson, Device, JsonFile, Quant, Threads
from ingot.cli.limits import PANEL, BatchInvariant, CacheTokens, KvDtype, MemoryFraction, TokenBudget
from ingot.config.build import DEFAULT_MAX_SEQ_LEN

BATCHES = "1,8,32,64"

Batch = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]


@dataclass(frozen=True)
class ModelFlags:
    """What is measured, on what, at which lengths."""

    engine: Annotated[
        str | None,
        typer.Argument(
            help="An engine folder, a checkpoint folder or a Hugging Face id.",
            metavar="ENGINE_OR_CHECKPOINT",
            show_default=False,
        ),
    ] = None
    random_weights: Annotated[
        str | None,
        typer.Option(help="A config.json (or its folder), run with random weights instead of an engine."),
    ] = None
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 512
    new_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = 128
    as_json: AsJson = False
    json_file: JsonFile = None
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per request; for an engine, up to its own limit.",
            show_default=f"as built, or the model's up to {DEFAULT_MAX_SEQ_LEN}",
            min=1,
            rich_help_panel=PANEL,
        ),
    ] = None
    dtype: Annotated[
        str, typer.Option(help="Compute dtype: fp16, bf16, fp32, or auto: the model's, fp32 on a CPU.")
    ] = "auto"
    device: Device = None


@dataclass(frozen=True)
class SideFlags(ModelFlags):
    """And how it runs, beside what."""

    against: Annotated[
        str | None,
        typer.Option(
            help="What to compare with: hf (the Hugging Face class on the same weights), "
            "hf:CHECKPOINT, or another engine or checkpoint.",
            metavar="hf|CHECKPOINT",
        ),
    ] = None
    quant: Quant = None
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Maximum requests per step; for an engine, up to its own limit.",
            min=1,
            show_default="as built, or as needed",
            rich_help_panel=PANEL,
        ),
    ] = None
    memory_fraction: MemoryFraction = None
    cache_tokens: CacheTokens = None
    token_budget: TokenBudget = None
    kv_dtype: KvDtype = None
    threads: Threads = None
    batch_invariant: BatchInvariant = False
