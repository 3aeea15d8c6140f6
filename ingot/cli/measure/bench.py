"""``ingot bench``: how fast an engine is on this machine.

Covers the verbs that measure a model, and where tables and JSON go.

    ingot bench latency engines/pocket-chat --batch 1,8
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.measure.bench_serving import serving
from ingot.cli.options.bench_flags import BATCHES, Batch, BenchCaptionFlags, ClipFlags, ModelFlags, SideFlags
from ingot.cli.options.flags import field_flags, given, option, set_threads
from ingot.cli.options.limit_flags import runtime_values
from ingot.cli.terminal.console import command_line, print_json, print_table, stderr, stdout
from ingot.cli.terminal.step_list import status_shown

if TYPE_CHECKING:
    from ingot.measure.bench.bench_report import Record
    from ingot.measure.bench.latency import Latency
    from ingot.measure.side.side_spec import SideSpec
    from ingot.measure.side.token_load import TokenLoad

MIXED, MIXED_BATCH, HF_BATCH = 256, 256, 32
LATENCY_REPEATS, THROUGHPUT_REPEATS = 5, 3
_TEXT = "A file whose text is the prompt, of any length; adds seconds per generated character."
_REQUESTS = "Lengths from ShareGPT-style JSON: the first human turn and its answer."

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
    repeats: Annotated[int, option("Timed runs of each batch size.")] = LATENCY_REPEATS,
    text: Annotated[Path | None, option(_TEXT)] = None,
) -> None:
    """Time batches of equal requests: time to first token and time per decode step."""
    from ingot.measure.bench.bench_session import bench as measured
    from ingot.measure.bench.latency import Latency
    from ingot.measure.side.token_load import parse_batches

    wanted = Latency(tuple(parse_batches(batch)), flags.prompt_tokens, flags.new_tokens, repeats)
    spec = _side(flags, wanted.most)
    if text is not None:
        spec, wanted = spec.replace(prefix_reuse=False), _of_text(spec, wanted, text)
    set_threads(flags.threads)
    with status_shown("starting") as say:
        record = measured(spec, wanted, _other(spec, flags.against), command=command_line(), say=say)
    _show(record, flags)


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
    repeats: Annotated[int, option("Timed runs of the load.")] = THROUGHPUT_REPEATS,
    hf_batch: Annotated[int, option("Requests per padded batch, for --against hf.", min=1)] = HF_BATCH,
) -> None:
    """Measure throughput with many requests that arrive at once."""
    from ingot.measure.bench.bench_session import bench as measured
    from ingot.measure.bench.throughput import Throughput
    from ingot.measure.side.token_load import fixed as fixed_load
    from ingot.measure.side.token_load import mixed as mixed_load

    spec = _side(flags, MIXED_BATCH)
    if sum(value is not None for value in (requests, mixed, fixed)) > 1:
        raise typer.BadParameter("--requests, --mixed and --fixed are mutually exclusive")
    if limit is not None and requests is None:
        raise typer.BadParameter("--limit needs --requests")
    if requests is not None:
        load = _sharegpt(spec, requests, limit)
    elif fixed is not None:
        load = fixed_load(fixed, flags.prompt_tokens, flags.new_tokens)
    else:
        load = mixed_load(MIXED if mixed is None else mixed)
    set_threads(flags.threads)
    other = _other(spec, flags.against, hf_batch)
    with status_shown("starting") as say:
        record = measured(spec, Throughput(load, repeats), other, command=command_line(), say=say)
    _show(record, flags)


@bench.command()
@field_flags("flags")
def transcribe(flags: ClipFlags) -> None:
    """Time clips of speech's lengths, one after another and at once: seconds, RTFx, milliseconds per clip.

    The audio is synthetic, and the number of tokens is fixed per second of it: weights change no figure.
    """
    from ingot.measure.bench.bench_session import bench as measured
    from ingot.measure.bench.transcription_speed import TranscriptionBench
    from ingot.measure.side.token_load import parse_batches

    batches = tuple(parse_batches(flags.batch))
    wanted = TranscriptionBench(flags.clips, batches, flags.tokens_per_second, flags.repeats)
    most = max(batches)
    spec = _spec(flags, max_batch_size=most, **given(quant=flags.quant), **runtime_values(flags))
    set_threads(flags.threads)
    other = _other(spec, flags.against, most)
    with status_shown("starting") as say:
        record = measured(spec, wanted, other, command=command_line(), say=say)
    _show(record, flags)


@bench.command()
@field_flags("flags")
def caption(flags: BenchCaptionFlags) -> None:
    """Time questions about pictures: the encoder, the first token, whole answers.

    Pictures are random values, and the number of tokens is fixed: weights change no figure.
    """
    from ingot.measure.bench.bench_session import bench as measured
    from ingot.measure.bench.caption_speed import CaptionBench
    from ingot.measure.side.token_load import parse_batches

    batches = tuple(parse_batches(flags.batch))
    lengths = (flags.prompt_tokens, flags.new_tokens)
    wanted = CaptionBench(flags.pictures, batches, *lengths, flags.repeats)
    values = {**given(quant=flags.quant), **runtime_values(flags)}
    spec = _spec(flags, max_batch_size=max(batches), engine_batch_size=max(batches), **values)
    set_threads(flags.threads)
    other = _other(spec, flags.against)
    with status_shown("starting") as say:
        record = measured(spec, wanted, other, command=command_line(), say=say)
    _show(record, flags)


@bench.command()
@field_flags("flags")
def kernels(flags: ModelFlags, batch: Batch = BATCHES) -> None:
    """Time every kernel against PyTorch's at a model's shapes. Needs a GPU, reads no weights.

    In a decode step the context is --prompt-tokens plus --new-tokens tokens long.
    """
    from ingot.device import resolve_device
    from ingot.measure.bench.bench_session import bench_kernels
    from ingot.measure.bench.kernel_bench.kernel_times import Kernels
    from ingot.measure.side.token_load import parse_batches

    rows = tuple(parse_batches(batch))
    spec = _spec(flags, max_batch_size=max(rows))
    if resolve_device(spec.device).type != "cuda":
        raise typer.BadParameter("kernels are measured on a GPU, not on a CPU", param_hint="--device")
    wanted = Kernels(rows, flags.prompt_tokens + flags.new_tokens, flags.prompt_tokens)
    with status_shown("starting") as say:
        record = bench_kernels(spec, wanted, command=command_line(), say=say)
    _show(record, flags)


def _side(flags: SideFlags, most: int) -> SideSpec:
    """The side that is measured, with room for the batch asked for, or for the largest that is measured."""
    from ingot.device import resolve_device

    spec = _spec(
        flags,
        max_batch_size=flags.max_batch_size or most,
        engine_batch_size=flags.max_batch_size,
        **given(quant=flags.quant),
        **runtime_values(flags),
    )
    if spec.dtype == "fp16" and resolve_device(spec.device).type == "cpu":
        stderr().print("note: fp16 on a CPU is several times slower than fp32, which --dtype auto uses there")
    return spec


def _spec(flags: ModelFlags | ClipFlags | BenchCaptionFlags, **values: Any) -> SideSpec:
    from ingot.measure.side.side_spec import SideSpec

    if (flags.engine is None) == (flags.random_weights is None):
        raise typer.BadParameter("give either ENGINE_OR_CHECKPOINT or --random-weights CONFIG")
    return SideSpec(
        path=flags.engine,
        random_weights=flags.random_weights,
        max_seq_len=flags.max_seq_len,
        dtype=flags.dtype,
        **given(device=flags.device),
        **values,
    )


def _other(spec: SideSpec, against: str | None, hf_batch: int | None = None) -> SideSpec | None:
    if against is None:
        return None
    from ingot.measure.side.side_spec import HUGGINGFACE, against_parts

    is_class, path = against_parts(against)
    if not is_class:
        return spec.replace(path=path, random_weights=None, quant="none")
    size = hf_batch or spec.max_batch_size
    spec = spec.replace(
        kind=HUGGINGFACE, max_batch_size=size, batch_invariant=False, quant="none", kv_dtype="auto"
    )
    return spec.replace(path=path, random_weights=None) if path else spec


def _sharegpt(spec: SideSpec, file: Path, limit: int | None) -> TokenLoad:
    from ingot.measure.bench.sharegpt import sharegpt_load
    from ingot.measure.side.side_spec import read_tokenizer

    return sharegpt_load(file, read_tokenizer(spec).encode, limit, _longest(spec))


def _of_text(spec: SideSpec, wanted: Latency, file: Path) -> Latency:
    """The same batches with a file's text as every prompt."""
    from ingot.config.files.json_text import read_text
    from ingot.measure.bench.text_latency import TextLatency
    from ingot.measure.side.side_spec import read_tokenizer

    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="--text") from None
    ids = read_tokenizer(spec, "--prompt-tokens instead of --text").encode(text)
    return TextLatency.of(ids, wanted.batches, wanted.new_tokens, wanted.repeats)


def _longest(spec: SideSpec) -> int | None:
    """The most tokens of a request: the limit asked for, or an engine's own."""
    from ingot.engine.manifest import Manifest, is_engine

    if spec.max_seq_len is None and spec.path is not None and is_engine(Path(spec.path)):
        return Manifest.read(Path(spec.path)).build.max_seq_len
    return spec.max_seq_len


def _show(record: Record, flags: ModelFlags | ClipFlags | BenchCaptionFlags) -> None:
    if flags.json_file is not None:
        Path(flags.json_file).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if flags.as_json:
        print_json(record)
        return
    from ingot.measure.bench.bench_report import headline, tables

    for line in headline(record):
        stdout().print(line, markup=False)
    for table in tables(record):
        stdout().print()
        print_table(table)
    for side in record["sides"]:
        for doubt in side.get("doubts", ()):
            stderr().print(f"warning: {side['name']}, {doubt}", markup=False)
