"""The flags that the verbs of ``ingot eval`` share.

Owns their names, help and defaults, and what they say of both sides. Knows no metric.

    @field_flags("flags")
    def answers(flags: AskFlags) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.flags import (
    RARELY,
    AsJson,
    Device,
    JsonFile,
    Quant,
    SkipBad,
    Threads,
    Where,
    given,
    writable_file,
)
from ingot.cli.limits import PANEL, KvDtype, MemoryFraction, TokenBudget, runtime_values
from ingot.config.build import DEFAULT_MAX_SEQ_LEN

if TYPE_CHECKING:
    from ingot.evaluate.side import SideSpec

DTYPES = ("auto", "fp16", "bf16", "fp32")


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise typer.BadParameter(f"{value}; allowed: {', '.join(DTYPES)}")
    return value


@dataclass(frozen=True)
class EvalFlags:
    """What is evaluated, on what, beside what."""

    engine: Annotated[
        str,
        typer.Argument(
            help="An engine folder, a checkpoint folder or a Hugging Face id.",
            metavar="ENGINE_OR_CHECKPOINT",
            show_default=False,
        ),
    ]
    data: Annotated[
        Path,
        typer.Option(
            help="Items: .jsonl (one record per line), .json (a list of records), .txt (running text).",
            show_default=False,
        ),
    ]
    against: Annotated[
        str | None,
        typer.Option(
            help="The reference: hf (the Hugging Face class on the same checkpoint), "
            "hf:CHECKPOINT, or another "
            "engine or checkpoint.",
            metavar="hf|CHECKPOINT",
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(help="Use the first N items.", min=1)] = None
    max_delta: Annotated[
        list[str] | None,
        typer.Option(
            help="Limit on |difference| for exit code 0: X, or METRIC=X; may be repeated.",
            metavar="X|METRIC=X",
            show_default="by metric",
        ),
    ] = None
    as_json: AsJson = False
    json_file: JsonFile = None
    items: Annotated[
        str | None,
        typer.Option(help="Write one line of JSON per item.", metavar="FILE", callback=writable_file),
    ] = None
    skip_bad: SkipBad = False
    where: Where = None
    dtype: Annotated[
        str,
        typer.Option(
            help="Compute dtype: fp16, bf16, fp32, or auto: the model's, fp32 on a CPU.", callback=_dtype
        ),
    ] = "auto"
    quant: Quant = None
    against_dtype: Annotated[
        str | None,
        typer.Option(
            help="Compute dtype of the reference.", show_default="as --dtype", rich_help_panel=RARELY
        ),
    ] = None
    against_batch: Annotated[
        int,
        typer.Option(help="Prompts per padded batch, for --against hf.", min=1, rich_help_panel=RARELY),
    ] = 8
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per request; for an engine, up to its own limit.",
            min=2,
            show_default=f"as built, or the model's up to {DEFAULT_MAX_SEQ_LEN}",
            rich_help_panel=PANEL,
        ),
    ] = None
    memory_fraction: MemoryFraction = None
    token_budget: TokenBudget = None
    kv_dtype: KvDtype = None
    device: Device = None
    threads: Threads = None

    def sides(self) -> tuple[SideSpec, SideSpec | None]:
        """The side that is evaluated, and the reference."""
        from ingot.evaluate.side import SideSpec, other_spec

        spec = SideSpec(
            self.engine,
            dtype=self.dtype,
            max_seq_len=self.max_seq_len,
            **given(device=self.device, quant=self.quant),
            **runtime_values(self),
        )
        if self.against is None:
            return spec, None
        dtype = self.dtype if self.against_dtype is None else _dtype(self.against_dtype)
        return spec, other_spec(spec, self.against, dtype, self.against_batch)


@dataclass(frozen=True)
class AskFlags(EvalFlags):
    """And how items are asked."""

    max_new_tokens: Annotated[int, typer.Option(help="Maximum new tokens per answer.", min=1)] = 128
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Wrap articles and prompts as user messages in the chat template.",
            show_default="articles, if the engine has a template",
        ),
    ] = None


@dataclass(frozen=True)
class ReadFlags(EvalFlags):
    """And how running text is read."""

    window: Annotated[
        int | None,
        typer.Option(help="Tokens per window.", show_default="the smaller context", min=2),
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from one window to the next; only the last N of each window count.", min=1),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Use the first N tokens of each text.", min=2, rich_help_panel=RARELY),
    ] = None
