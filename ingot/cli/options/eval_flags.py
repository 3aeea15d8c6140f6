"""The flags that the verbs of ``ingot eval`` share.

Covers their names, help and defaults, and what they say of both sides.

    @field_flags("flags")
    def answers(flags: AskFlags) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.options.bench_flags import EngineOrCheckpoint, max_seq_len
from ingot.cli.options.flags import (
    RARELY,
    AsJson,
    Device,
    JsonFile,
    Quant,
    SkipBad,
    Threads,
    Where,
    given,
    option,
    writable_file,
)
from ingot.cli.options.limit_flags import KvDtype, MemoryFraction, TokenBudget, runtime_values

if TYPE_CHECKING:
    from ingot.measure.evaluate.perplexity import WindowSettings
    from ingot.measure.side.side_spec import SideSpec

DTYPES = ("auto", "fp16", "bf16", "fp32")


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise typer.BadParameter(f"{value}; allowed: {', '.join(DTYPES)}")
    return value


_DATA = (
    "Items: .jsonl (one record per line), .json (a list of records), .txt (running text); for wer also a "
    "folder in LibriSpeech's layout, for caption one of pictures."
)
_AGAINST = (
    "The reference: hf (the Hugging Face class on the same checkpoint), hf:CHECKPOINT, or another engine or "
    "checkpoint."
)
_DELTA = "Limit on |difference| for exit code 0: X, or METRIC=X; may be repeated."
_DTYPE = "Compute dtype: fp16, bf16, fp32, or auto: the model's, fp32 on a CPU."
_CHAT = "Wrap articles and prompts as user messages in the chat template."
_STRIDE = "Tokens from one window to the next; only the last N of each window count."


@dataclass(frozen=True)
class EvalFlags:
    """What is evaluated, on what, beside what."""

    engine: Annotated[str, EngineOrCheckpoint]
    data: Annotated[Path, option(_DATA, shown=False)]
    against: Annotated[str | None, option(_AGAINST, metavar="hf|CHECKPOINT")] = None
    limit: Annotated[int | None, option("Use the first N items.", min=1)] = None
    max_delta: Annotated[list[str] | None, option(_DELTA, metavar="X|METRIC=X", shown="by metric")] = None
    as_json: AsJson = False
    json_file: JsonFile = None
    items: Annotated[
        str | None, option("Write one line of JSON per item.", metavar="FILE", callback=writable_file)
    ] = None
    skip_bad: SkipBad = False
    where: Where = None
    dtype: Annotated[str, option(_DTYPE, callback=_dtype)] = "auto"
    quant: Quant = None
    against_dtype: Annotated[
        str | None, option("Compute dtype of the reference.", shown="as --dtype", panel=RARELY)
    ] = None
    against_batch: Annotated[
        int, option("Prompts per padded batch, for --against hf.", panel=RARELY, min=1)
    ] = 8
    max_seq_len: Annotated[int | None, max_seq_len(2)] = None
    memory_fraction: MemoryFraction = None
    token_budget: TokenBudget = None
    kv_dtype: KvDtype = None
    device: Device = None
    threads: Threads = None

    def sides(self) -> tuple[SideSpec, SideSpec | None]:
        """The side that is evaluated, and the reference."""
        from ingot.measure.side.side_spec import SideSpec, other_spec

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

    max_new_tokens: Annotated[int, option("Maximum new tokens per answer.", min=1)] = 128
    chat: Annotated[
        bool | None, option(_CHAT, "--chat/--no-chat", shown="articles, if the engine has a template")
    ] = None


@dataclass(frozen=True)
class WerFlags(EvalFlags):
    """And how many recordings are transcribed at once."""

    batch: Annotated[
        int | None, option("Recordings at once; 1: one after another.", shown="as built", min=1)
    ] = None


@dataclass(frozen=True)
class EvalCaptionFlags(EvalFlags):
    """And what is asked about pictures."""

    prompt: Annotated[str, option("What is asked about each picture.")] = "Describe this image."
    max_new_tokens: Annotated[int, option("Maximum new tokens per caption.", min=1)] = 300


@dataclass(frozen=True)
class ReadFlags(EvalFlags):
    """And how running text is read."""

    window: Annotated[int | None, option("Tokens per window.", shown="the smaller context", min=2)] = None
    stride: Annotated[int | None, option(_STRIDE, min=1)] = None
    max_tokens: Annotated[int | None, option("Use the first N tokens of each text.", panel=RARELY, min=2)] = (
        None
    )

    def reading(self) -> WindowSettings:
        """The windows."""
        from ingot.measure.evaluate.perplexity import WindowSettings

        return WindowSettings(self.window, self.stride, self.max_tokens)
