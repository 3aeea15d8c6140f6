"""``ingot bench``: how fast an engine is on this machine.

Owns the flags of its three verbs, and where tables and JSON go. Knows no measurement.

    ingot bench latency engines/pocket-chat --batch 1,8
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.console import print_json, stderr, stdout
from ingot.cli.flags import Device, Threads, given
from ingot.config.build import DEFAULT_MAX_SEQ_LEN
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.bench.load import Load
    from ingot.bench.report import Record, Table
    from ingot.bench.side import SideSpec

BATCHES = "1,8,32,64"
PROMPT_TOKENS, NEW_TOKENS = 512, 128
MIXED, MIXED_BATCH, HF_BATCH = 256, 256, 32
LATENCY_REPEATS, THROUGHPUT_REPEATS = 5, 3

Subject = Annotated[
    str | None,
    typer.Argument(
        help="An engine folder, a checkpoint folder or a Hugging Face id.",
        metavar="ENGINE_OR_CHECKPOINT",
        show_default=False,
    ),
]
RandomWeights = Annotated[
    str | None,
    typer.Option(help="A config.json (or its folder) to fill with random weights, instead of an engine."),
]
Against = Annotated[
    str | None,
    typer.Option(
        help="The side to compare with: hf (Hugging Face's class on the same weights), hf:CHECKPOINT, or "
        "another engine or checkpoint.",
        metavar="hf|CHECKPOINT",
    ),
]
Batch = Annotated[str, typer.Option(help="Batch sizes, with commas between.")]
PromptTokens = Annotated[int, typer.Option(help="Tokens of each prompt.")]
NewTokens = Annotated[int, typer.Option(help="Tokens generated for each.")]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        help="Write every raw figure to a file as JSON; '-': to stdout.",
        metavar="FILE",
        callback=lambda value: _json_target(value),
    ),
]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(help="Most requests in one step; an engine has its own.", min=1, show_default="as needed"),
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of one request; an engine has its own.",
        show_default=f"the model's, at most {DEFAULT_MAX_SEQ_LEN}",
        min=1,
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Dtype of arithmetic: fp16, bf16, fp32; auto: the model's, fp32 on a CPU.")
]
TokenBudget = Annotated[int | None, typer.Option(help="Most tokens of one step.", show_default="2048", min=1)]

bench = typer.Typer(
    name="bench",
    help="Measure speed on this machine: latency, throughput, kernels.",
    no_args_is_help=True,
    add_completion=False,
)


@bench.command()
def latency(
    engine: Subject = None,
    random_weights: RandomWeights = None,
    against: Against = None,
    batch: Batch = BATCHES,
    prompt_tokens: PromptTokens = PROMPT_TOKENS,
    new_tokens: NewTokens = NEW_TOKENS,
    repeats: Annotated[int, typer.Option(help="Timed runs of each batch size.")] = LATENCY_REPEATS,
    json_file: Json = None,
    max_batch_size: MaxBatchSize = None,
    max_seq_len: MaxSeqLen = None,
    dtype: Dtype = "auto",
    device: Device = None,
    token_budget: TokenBudget = None,
    threads: Threads = None,
) -> None:
    """Time batches of equal requests: to the first token, and a decode step."""
    from ingot.bench.latency import Latency
    from ingot.bench.load import parse_batches
    from ingot.bench.session import bench_latency

    wanted = Latency(tuple(parse_batches(batch)), prompt_tokens, new_tokens, repeats)
    spec = _spec(
        engine,
        random_weights,
        max_batch_size=_batch_room(engine, max_batch_size, wanted.most),
        **given(max_seq_len=max_seq_len, dtype=dtype, device=device, token_budget=token_budget),
    )
    _set_threads(threads)
    with _progress() as say:
        record = bench_latency(spec, wanted, _other(spec, against), command=_command(), say=say)
    _show(record, json_file)


@bench.command()
def throughput(
    engine: Subject = None,
    random_weights: RandomWeights = None,
    against: Against = None,
    requests: Annotated[
        Path | None,
        typer.Option(help="Lengths from ShareGPT-shaped JSON: first human turn, and the answer after it."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Take the first so many of --requests.", min=1)] = None,
    mixed: Annotated[
        int | None,
        typer.Option(
            help="So many requests of lognormal lengths from a fixed seed.", show_default=str(MIXED)
        ),
    ] = None,
    fixed: Annotated[
        int | None, typer.Option(help="So many requests of --prompt-tokens and --new-tokens each.")
    ] = None,
    prompt_tokens: PromptTokens = PROMPT_TOKENS,
    new_tokens: NewTokens = NEW_TOKENS,
    repeats: Annotated[int, typer.Option(help="Timed runs of the load.")] = THROUGHPUT_REPEATS,
    hf_batch: Annotated[
        int, typer.Option(help="Requests of one padded batch, for --against hf.", min=1)
    ] = HF_BATCH,
    json_file: Json = None,
    max_batch_size: MaxBatchSize = None,
    max_seq_len: MaxSeqLen = None,
    dtype: Dtype = "auto",
    device: Device = None,
    token_budget: TokenBudget = None,
    threads: Threads = None,
) -> None:
    """Answer many requests that arrive at once."""
    from ingot.bench.load import fixed as fixed_load
    from ingot.bench.load import mixed as mixed_load
    from ingot.bench.session import Throughput, bench_throughput

    spec = _spec(
        engine,
        random_weights,
        max_batch_size=_batch_room(engine, max_batch_size, MIXED_BATCH),
        **given(max_seq_len=max_seq_len, dtype=dtype, device=device, token_budget=token_budget),
    )
    if sum(value is not None for value in (requests, mixed, fixed)) > 1:
        raise typer.BadParameter("--requests, --mixed and --fixed exclude each other")
    if limit is not None and requests is None:
        raise typer.BadParameter("--limit needs --requests")
    if requests is not None:
        load = _sharegpt(spec, requests, limit)
    elif fixed is not None:
        load = fixed_load(fixed, prompt_tokens, new_tokens)
    else:
        load = mixed_load(MIXED if mixed is None else mixed)
    _set_threads(threads)
    other = _other(spec, against, hf_batch)
    with _progress() as say:
        record = bench_throughput(spec, Throughput(load, repeats), other, command=_command(), say=say)
    _show(record, json_file)


@bench.command()
def kernels(
    engine: Subject = None,
    random_weights: RandomWeights = None,
    batch: Batch = BATCHES,
    prompt_tokens: PromptTokens = PROMPT_TOKENS,
    new_tokens: NewTokens = NEW_TOKENS,
    json_file: Json = None,
    max_seq_len: MaxSeqLen = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Time every kernel at a model's shapes beside PyTorch's; needs a GPU, reads no weights.

    A decode step's requests see --prompt-tokens and --new-tokens tokens together.
    """
    from ingot.bench.kernels import Kernels
    from ingot.bench.load import parse_batches
    from ingot.bench.session import bench_kernels
    from ingot.device import resolve_device

    rows = tuple(parse_batches(batch))
    spec = _spec(
        engine,
        random_weights,
        max_batch_size=max(rows),
        **given(max_seq_len=max_seq_len, dtype=dtype, device=device),
    )
    if resolve_device(spec.device).type != "cuda":
        raise typer.BadParameter("kernels are measured on a GPU, and this is a CPU", param_hint="--device")
    wanted = Kernels(rows, prompt_tokens + new_tokens, prompt_tokens)
    with _progress() as say:
        record = bench_kernels(spec, wanted, command=_command(), say=say)
    _show(record, json_file)


def _spec(engine: str | None, random_weights: str | None, **values: Any) -> SideSpec:
    """The side that is measured: an engine or checkpoint, or a config with random weights."""
    from ingot.bench.side import SideSpec

    if (engine is None) == (random_weights is None):
        raise typer.BadParameter("give either ENGINE_OR_CHECKPOINT or --random-weights CONFIG")
    return SideSpec(path=engine, random_weights=random_weights, **values)


def _batch_room(engine: str | None, asked: int | None, most: int) -> int:
    """The batch that a side is opened for: the one asked for, or the largest that is measured."""
    from ingot.engine.manifest import is_engine

    if asked is not None and engine is not None and is_engine(Path(engine)):
        raise ConfigError(
            "max_batch_size is fixed when an engine is built", seen=asked, fix="leave --max-batch-size out"
        )
    return asked or most


def _json_target(value: str | None) -> str | None:
    """A place that can be written, made sure of before anything is measured."""
    if value is None or value == "-":
        return value
    path = Path(value)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot be written: {error}", param_hint="--json") from None
    return value


def _other(spec: SideSpec, against: str | None, hf_batch: int | None = None) -> SideSpec | None:
    """The side that it is compared with."""
    if against is None:
        return None
    kind, _, path = against.partition(":")
    if kind != "hf":
        return spec.replace(path=against, random_weights=None)
    size = hf_batch or spec.max_batch_size
    if path:
        return spec.replace(kind="hf", path=path, random_weights=None, max_batch_size=size)
    return spec.replace(kind="hf", max_batch_size=size)


def _sharegpt(spec: SideSpec, file: Path, limit: int | None) -> Load:
    from ingot.bench.sharegpt import sharegpt_load
    from ingot.bench.side import read_tokenizer

    return sharegpt_load(file, read_tokenizer(spec).encode, limit, _longest(spec))


def _longest(spec: SideSpec) -> int | None:
    """The most tokens of a request: an engine's own limit, or the one asked for."""
    from ingot.engine.manifest import Manifest, is_engine

    if spec.path is not None and is_engine(Path(spec.path)):
        return Manifest.read(Path(spec.path)).build.max_seq_len
    return spec.max_seq_len


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _command() -> str:
    return shlex.join(["ingot", *sys.argv[1:]])


@contextmanager
def _progress() -> Iterator[Callable[[str], None] | None]:
    """What is being measured, on stderr; None where that is no terminal."""
    if not stderr().is_terminal:
        yield None
        return
    with stderr().status("starting") as status:
        yield status.update


def _show(record: Record, json_file: str | None) -> None:
    """The tables, and the JSON where it was asked for; with ``-`` stdout has the JSON alone."""
    if json_file == "-":
        print_json(record)
        return
    from ingot.bench.report import headline, tables

    for line in headline(record):
        stdout().print(line, markup=False)
    for table in tables(record):
        stdout().print()
        _print_table(table)
    for side in record["sides"]:
        for doubt in side.get("doubts", ()):
            stderr().print(f"warning: {side['name']}, {doubt}", markup=False)
    if json_file is not None:
        path = Path(json_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _print_table(table: Table) -> None:
    """With lines on a terminal, as aligned text elsewhere."""
    from ingot.bench.report import plain

    if not stdout().is_terminal:
        stdout().print(plain(table), markup=False)
        return
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=Text(table.title), title_justify="left")
    for i, name in enumerate(table.columns):
        shown.add_column(Text(name), justify="left" if i == 0 else "right")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    stdout().print(shown)
