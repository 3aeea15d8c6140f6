"""``ingot profile``: the kernels of one step of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.measure.bench import BenchFlags, side_spec
from ingot.cli.options.flags import (
    Quant,
    SkipBad,
    Threads,
    field_flags,
    option,
    set_threads,
    writable_file,
)
from ingot.cli.options.limit_flags import KvDtype, MemoryFraction
from ingot.cli.terminal.console import command_line, json_text, print_json, print_report, stderr
from ingot.cli.terminal.step_list import PIPED_SECONDS, status_shown

if TYPE_CHECKING:
    from ingot.measure.bench.bench_session import Record
    from ingot.measure.evaluate.scored_answers import Summaries
    from ingot.measure.side.side_spec import SideSpec

_STEP = (
    "prompt (the first step of requests), decode (a token of each), mixed (a prompt beside decodes) or "
    "encode (pictures or recordings)."
)
_BATCH = "Requests of the step, up to the engine's limit; of a mixed step one is a prompt."
_TOKENS = "Tokens per prompt."
_TRACE = "Write the profiler's events to a file, which ui.perfetto.dev opens."
_WITHOUT = (
    "Also run PyTorch's operators in this kernel's place and compare; may be repeated. One of rms_norm, "
    "layer_norm, rope, attention, activation, softcap, products, sampling, fused."
)
_REPEATS = "Timed and profiled runs of the step."
_DATA = (
    "With --without: also ROUGE of the answers to these items with and without each kernel. Records as for "
    "`ingot eval summarize`."
)


@dataclass(frozen=True)
class ProfileFlags(BenchFlags):
    """The engine, the step, and where the figures go."""

    step: Annotated[str, option(_STEP, metavar="prompt|decode|mixed|encode")] = "decode"
    batch: Annotated[int | None, option(_BATCH, shown="1; mixed: 2", min=1)] = None
    prompt_tokens: Annotated[int | None, option(_TOKENS, shown="512, or half of the limit", min=1)] = None
    trace: Annotated[str | None, option(_TRACE, metavar="FILE", callback=writable_file)] = None
    without: Annotated[list[str] | None, option(_WITHOUT, shown=False, metavar="OPERATION")] = None
    data: Annotated[Path | None, option(_DATA, metavar="FILE", shown=False)] = None
    limit: Annotated[int | None, option("Use the first N items of --data.", shown="all", min=1)] = None
    max_new_tokens: Annotated[int | None, option("Maximum new tokens per answer.", shown="128", min=1)] = None
    skip_bad: SkipBad = False
    repeats: Annotated[int, option(_REPEATS, min=1)] = 5
    quant: Quant = None
    memory_fraction: MemoryFraction = None
    kv_dtype: KvDtype = None
    threads: Threads = None


@field_flags("flags")
def profile(flags: ProfileFlags) -> None:
    """Show the kernels of one step by module: launches, time, share of the machine's ceiling, gaps.

    On a CPU it shows PyTorch's operators.
    """
    flags.expect_paths()
    from ingot.measure.bench.profile.profile_session import Profile
    from ingot.measure.bench.profile.profile_session import profile as run

    files = [Path(file).resolve() for file in (flags.trace, flags.json_file) if file is not None]
    if len(set(files)) < len(files):
        raise typer.BadParameter("it names the same file as --json-file", param_hint="--trace")
    batch = flags.batch if flags.batch is not None else 2 if flags.step == "mixed" else 1
    without = tuple(dict.fromkeys(flags.without or ()))
    wanted = Profile(flags.step, batch, flags.prompt_tokens, without, flags.repeats)
    spec, answers = side_spec(flags, max_batch_size=batch), read_answers(flags)
    set_threads(flags.threads)
    with status_shown("starting", PIPED_SECONDS) as say:
        record = run(spec, wanted, trace=flags.trace, answers=answers, command=command_line(), say=say)
    _show(record, flags)


def read_answers(flags: ProfileFlags) -> Callable[[SideSpec], Summaries] | None:
    """Reads the data of --data; None without it."""
    data = flags.data
    if data is None:
        given = {
            "--limit": flags.limit,
            "--max-new-tokens": flags.max_new_tokens,
            "--skip-bad": flags.skip_bad,
        }
        for name in (name for name, value in given.items() if value):
            raise typer.BadParameter("it needs --data, the items that are answered", param_hint=name)
        return None
    if not flags.without:
        raise typer.BadParameter("it needs --without, the kernels to leave out", param_hint="--data")
    if flags.random_weights is not None:
        raise typer.BadParameter("random weights answer nothing: it needs an engine", param_hint="--data")

    def read(spec: SideSpec) -> Summaries:
        from ingot.measure.evaluate.data_file import read_data
        from ingot.measure.evaluate.scored_answers import AnswerSettings, Summaries, question_check

        items = read_data(data, limit=flags.limit, skip_bad=flags.skip_bad, needs=question_check)
        asking = AnswerSettings() if flags.max_new_tokens is None else AnswerSettings(flags.max_new_tokens)
        return Summaries(spec, items, asking)

    return read


def _show(record: Record, flags: ProfileFlags) -> None:
    if flags.json_file is not None:
        Path(flags.json_file).write_text(json_text(record), encoding="utf-8")
    if flags.as_json:
        print_json(record)
    else:
        from ingot.measure.bench.bench_report import headline
        from ingot.measure.bench.profile.profile_report import profile_headline, profile_tables

        print_report([*headline(record), *profile_headline(record)], profile_tables(record))
    if flags.trace is not None:
        stderr().print(f"trace: {flags.trace}; open it at https://ui.perfetto.dev", markup=False)
