"""``ingot bench serving``: how fast a server answers under load."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options.flags import (
    RARELY,
    AsJson,
    JsonFile,
    NewTokens,
    PromptTokens,
    field_flags,
    option,
    writable_file,
)
from ingot.cli.terminal.console import json_text, print_json, print_report, stderr
from ingot.cli.terminal.step_list import PIPED_SECONDS, status_shown

if TYPE_CHECKING:
    from ingot.measure.bench.serving.serving_bench import Record, ServingBench
    from ingot.measure.bench.serving.serving_load import Point, Prompts

_FAILED = 1
_KEY = "--api-key"
_RATE = "Open loop: requests per second (Poisson), separated by commas; inf: all at once."
_CONCURRENCY = "Closed loop: requests in flight, separated by commas."
_LOAD = "fixed (--prompt-tokens and --new-tokens) or mixed (lognormal, as in bench throughput)."
_DATASET = (
    'Prompts from a .jsonl file: {"prompt": …}, {"messages": …} or {"prompt_token_ids": …}, with '
    '"output_tokens" in place of --new-tokens.'
)
_GOODPUT = "Also count requests within limits in ms: ttft:MS,tpot:MS,e2e:MS."
_SHARED = "Tokens before each prompt that all prompts share; without it prefix caches do not help."


@dataclass(frozen=True)
class ServingFlags:
    """The server, the load, and where the results go."""

    url: Annotated[str, option("The server, such as http://127.0.0.1:8000.", shown=False)]
    model: Annotated[str | None, option("A model of the server.", shown="its only one")] = None
    endpoint: Annotated[str, option("completions or chat.")] = "completions"
    rate: Annotated[str | None, option(_RATE, shown="inf")] = None
    concurrency: Annotated[str | None, option(_CONCURRENCY)] = None
    requests: Annotated[int, option("Requests of each load.")] = 100
    prompt_tokens: PromptTokens = 512
    new_tokens: NewTokens = 128
    load: Annotated[str, option(_LOAD)] = "fixed"
    dataset: Annotated[Path | None, option(_DATASET, metavar="FILE.jsonl")] = None
    shared_prefix: Annotated[int, option(_SHARED, min=0)] = 0
    goodput: Annotated[str | None, option(_GOODPUT, metavar="LIMITS")] = None
    api_key: Annotated[
        str | None,
        option("Sent as a bearer token; not recorded.", _KEY, envvar="INGOT_API_KEY", shown=False),
    ] = None
    as_json: AsJson = False
    json_file: JsonFile = None
    png: Annotated[
        str | None, option("Draw latency against load.", metavar="FILE", callback=writable_file)
    ] = None
    warm_up: Annotated[int, option("Requests ahead of the first load, thrown away.", panel=RARELY)] = 1
    vocab_size: Annotated[
        int | None, option("Random token ids are below it.", shown="1000", panel=RARELY, min=1)
    ] = None
    ignore_eos: Annotated[
        bool, option("Have every answer run to --new-tokens.", "--ignore-eos/--no-ignore-eos", panel=RARELY)
    ] = True
    seed: Annotated[int, option("Seed of arrival times.", panel=RARELY)] = 0

    def wanted(self) -> ServingBench:
        from ingot.measure.bench.serving.server_target import ServerTarget
        from ingot.measure.bench.serving.serving_bench import ServingBench
        from ingot.measure.bench.serving.serving_figures import parse_limits

        target = ServerTarget(self.url, self.model, self.endpoint, self.api_key, self.ignore_eos)
        limits = parse_limits(self.goodput) if self.goodput is not None else {}
        points = tuple(self._points())
        return ServingBench(target, self._prompts(), points, self.requests, self.warm_up, self.seed, limits)

    def _points(self) -> list[Point]:
        from ingot.measure.bench.serving.serving_load import parse_concurrencies, parse_rates

        if self.concurrency is None:
            return parse_rates("inf" if self.rate is None else self.rate)
        if self.rate is not None:
            raise typer.BadParameter("--rate and --concurrency are mutually exclusive")
        return parse_concurrencies(self.concurrency)

    def _prompts(self) -> Prompts:
        from ingot.measure.bench.serving.serving_load import VOCABULARY, FilePrompts, RandomPrompts
        from ingot.measure.side.token_load import Ask, check_counts

        check_counts(prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)
        if self.load not in ("fixed", "mixed"):
            raise typer.BadParameter("it takes fixed or mixed", param_hint="--load")
        if self.dataset is not None:
            if self.load != "fixed" or self.shared_prefix:
                raise typer.BadParameter("--dataset excludes --load mixed and --shared-prefix")
            return FilePrompts(self.dataset, self.new_tokens)
        shape = Ask(self.prompt_tokens, self.new_tokens) if self.load == "fixed" else None
        size = VOCABULARY if self.vocab_size is None else self.vocab_size
        chat = self.endpoint == "chat"
        return RandomPrompts(shape, chat=chat, shared_prefix=self.shared_prefix, vocab_size=size)


@field_flags("flags")
def serving(flags: ServingFlags) -> None:
    """Load an OpenAI-compatible server and measure TTFT, TPOT, ITL, E2E and throughput.

    Exit code 0: measured; 1: a load of which no request succeeded; 2: usage error, or no such server.
    """
    from ingot.measure.bench.serving.serving_bench import bench_serving, check_client

    check_client()
    if flags.png is not None:
        from ingot.measure.bench.charts import check_matplotlib

        check_matplotlib("leave out --png")
    with status_shown("starting", PIPED_SECONDS) as say:
        words = ["ingot"]
        for word in sys.argv[1:]:
            is_key = words[-1] == _KEY
            words.append("…" if is_key else f"{_KEY}=…" if word.startswith(f"{_KEY}=") else word)
        record = bench_serving(flags.wanted(), command=shlex.join(words), say=say)
    if flags.json_file is not None:
        Path(flags.json_file).write_text(json_text(record), encoding="utf-8")
    _show(record, flags)
    if not all(entry["completed"] for entry in record["results"]):
        raise typer.Exit(_FAILED)


def _show(record: Record, flags: Any) -> None:
    from ingot.measure.bench.serving.serving_report import (
        serving_lines,
        serving_panels,
        serving_tables,
        serving_title,
    )

    title, lines = serving_title(record), serving_lines(record)
    drawn = serving_panels(record) if flags.png is not None else []
    if drawn:
        from ingot.measure.bench.charts import write_png

        write_png(drawn, title, lines, Path(flags.png))
    if flags.as_json:
        print_json(record)
        return
    print_report((title, *lines), serving_tables(record))
    for doubt in record["doubts"]:
        stderr().print(f"warning: {doubt}", markup=False)
