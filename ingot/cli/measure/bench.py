"""``ingot bench``: how fast an engine is on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.measure.bench_serving import serving
from ingot.cli.opening import expect_model
from ingot.cli.options.flags import (
    AsJson,
    Device,
    EngineOrCheckpoint,
    JsonFile,
    NewTokens,
    PromptTokens,
    Quant,
    Threads,
    field_flags,
    given,
    option,
    set_threads,
)
from ingot.cli.options.limit_flags import (
    PANEL,
    BatchInvariant,
    CacheTokens,
    Embedding,
    KvDtype,
    MemoryFraction,
    TokenBudget,
    max_seq_len,
    runtime_values,
)
from ingot.cli.terminal.console import command_line, print_json, print_report, stderr
from ingot.cli.terminal.step_list import PIPED_SECONDS, status_shown

if TYPE_CHECKING:
    from ingot.measure.bench.bench_report import Record
    from ingot.measure.bench.bench_session import Wanted
    from ingot.measure.side.side_spec import SideSpec

MIXED = 256
BATCHES = "1,8,32,64"
Batch = Annotated[str, option("Batch sizes, separated by commas.")]
_TEXT = "A file whose text is the prompt, of any length; adds seconds per generated character."
_REQUESTS = "Lengths from ShareGPT-style JSON: the first human turn and its answer."
_RANDOM = "A config.json (or its folder), run with random weights instead of an engine."
_DTYPE = "Compute dtype: fp16, bf16, fp32, or auto: the model's, fp32 on a CPU."
_BATCH = "Maximum requests per step; for an engine, up to its own limit."
_AGAINST = (
    "What to compare with: hf (the Hugging Face class on the same weights), hf:CHECKPOINT, or another "
    "engine or checkpoint."
)
_TOKENS = "Tokens per second of audio, whatever the weights say."


@dataclass(frozen=True)
class BenchFlags:
    """The model, and where its figures go."""

    engine: Annotated[str | None, EngineOrCheckpoint] = None
    random_weights: Annotated[str | None, option(_RANDOM)] = None
    as_json: AsJson = False
    json_file: JsonFile = None
    max_seq_len: Annotated[int | None, max_seq_len(1)] = None
    dtype: Annotated[str, option(_DTYPE)] = "auto"
    device: Device = None

    def expect_paths(self) -> None:
        """Refuse what cannot be measured because it is not there, before PyTorch is imported."""
        if (self.engine is None) == (self.random_weights is None):
            raise typer.BadParameter("give either ENGINE_OR_CHECKPOINT or --random-weights CONFIG")
        if self.engine is not None:
            expect_model(self.engine)


@dataclass(frozen=True)
class ModelFlags(BenchFlags):
    """A model and the lengths of its requests."""

    prompt_tokens: PromptTokens = 512
    new_tokens: NewTokens = 128


@dataclass(frozen=True)
class ComparedFlags(BenchFlags):
    """A model, how it runs, and what it is compared with."""

    against: Annotated[str | None, option(_AGAINST, metavar="hf|CHECKPOINT")] = None
    quant: Quant = None
    memory_fraction: MemoryFraction = None
    kv_dtype: KvDtype = None
    threads: Threads = None


@dataclass(frozen=True)
class SideFlags(ModelFlags, ComparedFlags):
    """Requests, and the limits of the engine that answers them."""

    max_batch_size: Annotated[
        int | None, option(_BATCH, shown="as built, or as needed", panel=PANEL, min=1)
    ] = None
    cache_tokens: CacheTokens = None
    token_budget: TokenBudget = None
    embedding: Embedding = None
    batch_invariant: BatchInvariant = False


@dataclass(frozen=True)
class ClipFlags(ComparedFlags):
    """The clips that are transcribed."""

    clips: Annotated[int, option("Clips, with LibriSpeech's distribution of lengths.", min=1)] = 73
    batch: Annotated[str, option("Clips at once, separated by commas; 1: one after another.")] = "1,64"
    repeats: Annotated[int, option("Timed runs of each batch size.", min=1)] = 3
    tokens_per_second: Annotated[float, option(_TOKENS)] = 4.0


@dataclass(frozen=True)
class BenchCaptionFlags(ComparedFlags):
    """The pictures that are asked about."""

    pictures: Annotated[int, option("Pictures, each of its own.", min=1)] = 40
    batch: Annotated[str, option("Pictures at once, separated by commas; 1: one after another.")] = "1,40"
    prompt_tokens: Annotated[int, option("Text tokens around each picture.", min=1)] = 141
    new_tokens: Annotated[int, option("Tokens generated per picture.", min=1)] = 80
    repeats: Annotated[int, option("Timed runs of each batch size.", min=1)] = 3
    against: Annotated[str | None, option("Another engine or checkpoint.", metavar="ENGINE")] = None


bench = typer.Typer(
    name="bench",
    help="Measure speed on this machine: latency, throughput, kernels; and of servers.",
    no_args_is_help=True,
    add_completion=False,
)
bench.command()(serving)


@bench.command()
@field_flags("flags")
def latency(
    flags: SideFlags,
    batch: Batch = BATCHES,
    repeats: Annotated[int, option("Timed runs of each batch size.")] = 5,
    text: Annotated[Path | None, option(_TEXT)] = None,
) -> None:
    """Time batches of equal requests: time to first token and time per decode step."""
    flags.expect_paths()
    from ingot.config.files.json_text import read_text
    from ingot.measure.bench.latency import Latency, TextLatency
    from ingot.measure.side.side_spec import read_tokenizer
    from ingot.measure.side.token_load import parse_batches

    wanted = Latency(tuple(parse_batches(batch)), flags.prompt_tokens, flags.new_tokens, repeats)
    spec = _side(flags, wanted.most)
    if text is not None:
        try:
            content = read_text(text)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{text} cannot be read: {error}", param_hint="--text") from None
        ids = read_tokenizer(spec, "--prompt-tokens instead of --text").encode(content)
        wanted = TextLatency.of(ids, wanted.batches, wanted.new_tokens, wanted.repeats)
        spec = spec.replace(prefix_reuse=False)
    _measure(flags, spec, wanted)


@bench.command()
@field_flags("flags")
def throughput(
    flags: SideFlags,
    requests: Annotated[Path | None, option(_REQUESTS)] = None,
    limit: Annotated[int | None, option("Use the first N of --requests.", min=1)] = None,
    mixed: Annotated[
        int | None, option("N requests of lognormal lengths from a fixed seed.", shown=str(MIXED))
    ] = None,
    fixed: Annotated[int | None, option("N requests of --prompt-tokens and --new-tokens each.")] = None,
    repeats: Annotated[int, option("Timed runs of the load.")] = 3,
    hf_batch: Annotated[int, option("Requests per padded batch, for --against hf.", min=1)] = 32,
) -> None:
    """Measure throughput with many requests that arrive at once."""
    flags.expect_paths()
    from ingot.engine.manifest import Manifest, is_engine
    from ingot.measure.bench.sharegpt import sharegpt_load
    from ingot.measure.bench.throughput import Throughput
    from ingot.measure.side.side_spec import read_tokenizer
    from ingot.measure.side.token_load import fixed as fixed_load
    from ingot.measure.side.token_load import mixed as mixed_load

    spec = _side(flags, MIXED)
    if sum(value is not None for value in (requests, mixed, fixed)) > 1:
        raise typer.BadParameter("--requests, --mixed and --fixed are mutually exclusive")
    if limit is not None and requests is None:
        raise typer.BadParameter("--limit needs --requests")
    if requests is not None:
        longest = spec.max_seq_len
        if longest is None and spec.path is not None and is_engine(Path(spec.path)):
            longest = Manifest.read(Path(spec.path)).build.max_seq_len
        load = sharegpt_load(requests, read_tokenizer(spec).encode, limit, longest)
    elif fixed is not None:
        load = fixed_load(fixed, flags.prompt_tokens, flags.new_tokens)
    else:
        load = mixed_load(MIXED if mixed is None else mixed)
    _measure(flags, spec, Throughput(load, repeats), hf_batch)


@bench.command()
@field_flags("flags")
def transcribe(flags: ClipFlags) -> None:
    """Time clips of speech's lengths, one after another and at once: seconds, RTFx, milliseconds per clip.

    The audio is synthetic, and the number of tokens is fixed per second of it: weights change no figure.
    """
    flags.expect_paths()
    from ingot.measure.bench.transcription_speed import TranscriptionBench
    from ingot.measure.side.token_load import parse_batches

    batches = tuple(parse_batches(flags.batch))
    wanted = TranscriptionBench(flags.clips, batches, flags.tokens_per_second, flags.repeats)
    _measure(flags, side_spec(flags, max_batch_size=max(batches)), wanted)


@bench.command()
@field_flags("flags")
def caption(flags: BenchCaptionFlags) -> None:
    """Time questions about pictures: the encoder, the first token, whole answers.

    Pictures are random values, and the number of tokens is fixed: weights change no figure.
    """
    flags.expect_paths()
    from ingot.measure.bench.caption_speed import CaptionBench
    from ingot.measure.side.token_load import parse_batches

    batches = tuple(parse_batches(flags.batch))
    lengths = (flags.prompt_tokens, flags.new_tokens)
    wanted = CaptionBench(flags.pictures, batches, *lengths, flags.repeats)
    _measure(flags, side_spec(flags, max_batch_size=max(batches), engine_batch_size=max(batches)), wanted)


@bench.command()
@field_flags("flags")
def kernels(flags: ModelFlags, batch: Batch = BATCHES) -> None:
    """Time every kernel against PyTorch's at a model's shapes. Needs a GPU, reads no weights.

    In a decode step the context is --prompt-tokens plus --new-tokens tokens long.
    """
    flags.expect_paths()
    from ingot.measure.bench.bench_session import bench_kernels
    from ingot.measure.bench.kernel_bench.kernel_times import Kernels
    from ingot.measure.side.token_load import parse_batches

    rows = tuple(parse_batches(batch))
    spec = side_spec(flags, max_batch_size=max(rows))
    wanted = Kernels(rows, flags.prompt_tokens + flags.new_tokens, flags.prompt_tokens)
    with status_shown("starting", PIPED_SECONDS) as say:
        record = bench_kernels(spec, wanted, command=command_line(), say=say)
    _show(record, flags)


def _side(flags: SideFlags, most: int) -> SideSpec:
    """The side that is measured, with room for --max-batch-size or else ``most`` requests."""
    from ingot.device import resolve_device

    size = flags.max_batch_size
    spec = side_spec(flags, max_batch_size=size or most, engine_batch_size=size)
    if spec.dtype == "fp16" and resolve_device(spec.device).type == "cpu":
        stderr().print("note: fp16 on a CPU is several times slower than fp32, which --dtype auto uses there")
    return spec


def side_spec(flags: BenchFlags, **sizes: Any) -> SideSpec:
    """The engine, checkpoint or random weights that the flags name, with limits of these ``sizes``."""
    from ingot.measure.side.side_spec import SideSpec

    return SideSpec(
        path=flags.engine,
        random_weights=flags.random_weights,
        max_seq_len=flags.max_seq_len,
        dtype=flags.dtype,
        **given(device=flags.device, quant=getattr(flags, "quant", None)),
        **runtime_values(flags),
        **sizes,
    )


def _measure(flags: ComparedFlags, spec: SideSpec, wanted: Wanted, hf_batch: int | None = None) -> None:
    """Measure and show ``spec``, beside --against; ``hf_batch``: requests of its padded batch."""
    from ingot.measure.bench.bench_session import bench as run
    from ingot.measure.side.side_spec import HUGGINGFACE, against_parts

    other = None
    if flags.against is not None:
        is_class, path = against_parts(flags.against)
        if is_class:
            size = hf_batch or spec.max_batch_size
            other = spec.replace(
                kind=HUGGINGFACE, max_batch_size=size, batch_invariant=False, quant="none", kv_dtype="auto"
            )
        else:
            other = spec.replace(quant="none")
        if path:
            other = other.replace(path=path, random_weights=None)
    set_threads(flags.threads)
    with status_shown("starting", PIPED_SECONDS) as say:
        record = run(spec, wanted, other, command=command_line(), say=say)
    _show(record, flags)


def _show(record: Record, flags: BenchFlags) -> None:
    """Write and show a record; of one that was interrupted what there is, and the exit of a Ctrl-C."""
    if flags.json_file is not None:
        Path(flags.json_file).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if flags.as_json:
        print_json(record)
    else:
        from ingot.measure.bench.bench_report import headline, tables

        print_report(headline(record), tables(record))
        for side in record["sides"]:
            for doubt in side.get("doubts", ()):
                stderr().print(f"warning: {side['name']}, {doubt}", markup=False)
    if record.get("interrupted"):
        raise KeyboardInterrupt
