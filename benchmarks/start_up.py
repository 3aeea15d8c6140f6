"""Where the seconds of a start go: a server's first one on a machine, and the ones after it.

Each start is a process of its own; the first finds an empty folder of built kernels, the others what it left.
It is ready when the first request could come. Then it answers, and ends its warm-up as an idle server does.

    python benchmarks/start_up.py benchmarks/shapes/llama-7b.json --quant w4a16 --json start_up.json
    python benchmarks/start_up.py engines/llama-7b
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Phases:
    """Seconds of named parts; a part may hold others."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, owner: Any, name: str, label: str) -> None:
        """Time every call of an attribute."""
        usual: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(usual)
        def timed(*args: Any, **values: Any) -> Any:
            with self.of(label):
                return usual(*args, **values)

        setattr(owner, name, timed)

    def of(self, label: str) -> _Part:
        return _Part(self, label)


class _Part:
    def __init__(self, phases: Phases, label: str) -> None:
        self._phases, self._label = phases, label

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        took = time.perf_counter() - self._start
        self._phases.seconds[self._label] = self._phases.seconds.get(self._label, 0.0) + took


def as_before() -> None:
    """Build each kernel when it is first launched, and run each step before its capture."""
    from ingot.runtime import setup
    from ingot.runtime.step import chosen_products, graphs, layered_chunk, prompt_graphs, runner

    setup.without_launches = runner.built_ahead = contextlib.nullcontext  # type: ignore[assignment]
    for kind in (graphs.DecodeGraphs, prompt_graphs.PromptGraphs, layered_chunk.LayeredChunk):
        kind.launch_all = lambda *_: None  # type: ignore[attr-defined]
    chosen_products.Forward.launch_some = chosen_products.Forward.__call__  # type: ignore[method-assign]


def start(given: argparse.Namespace) -> Record:
    """Start once in this process, as a server does, and answer three prompts."""
    phases = Phases()
    phases.seconds["python"] = time.time() - given.one
    if not (given.before or given.at_once):
        from ingot.serve.engine_calls.early_context import begin_context

        begin_context(None)
    with phases.of("import torch"):
        import torch
    with phases.of("import ingot"):
        import triton

        from ingot.config.runtime_config import RuntimeConfig
        from ingot.kernels import built_ahead
        from ingot.kernels.triton_hooks import hash_compiler
        from ingot.llm import llm as llm_module
        from ingot.runtime import late_warm_up, rehearsal, setup
        from ingot.runtime.step import graphs, layered_chunk, prompt_graphs
    if given.before:
        as_before()
    built = kernels_built(triton)
    for owner, name, label in (
        (llm_module, "open_engine", "weights"),
        (llm_module, "engine_from_config", "weights"),
        (llm_module, "executor_of", "executor"),
        (setup, "measured_activations", "of it, the largest step"),
        (graphs.DecodeGraphs, "launch_all", "naming kernels"),
        (prompt_graphs.PromptGraphs, "launch_all", "naming kernels"),
        (built_ahead, "build_side_by_side", "building kernels"),
        (graphs.DecodeGraphs, "warm_up", "decode graphs"),
        (prompt_graphs.PromptGraphs, "warm_up", "prompt graphs"),
        (layered_chunk.LayeredChunk, "warm_up", "layered chunks"),
        (rehearsal, "rehearse", "rehearsal"),
        (late_warm_up, "begin_warm_up", "warm-up until ready"),
    ):
        phases.time(owner, name, label)
    runtime = RuntimeConfig(cache_tokens=given.cache_tokens)
    if not (given.before or given.at_once):
        hash_compiler()  # as open_engine does
    if Path(given.path).suffix == ".json":
        values = {"quant": given.quant, "dtype": given.dtype, "max_batch_size": given.batch}
        llm = llm_module.LLM.from_config(given.path, runtime=runtime, **values)
    else:
        llm = llm_module.LLM(given.path, runtime=runtime, max_batch_size=given.batch)
    late = None
    if given.before or given.at_once:
        llm.warm_up()
    else:
        late = llm._calls.loop.between_steps(
            lambda: late_warm_up.begin_warm_up(llm.executor, llm.engine.plan)
        )
    ready, runner = time.time() - given.one, llm.executor.runner
    seconds = {name: round(value, 2) for name, value in phases.seconds.items()}
    prompts = [[1, 2, 3], list(range(5, 300)), [7] * 40]
    answers = llm.generate(prompts, max_new_tokens=16, ignore_eos=True, temperature=0.0)
    return {
        "before": given.before,
        "ready_s": round(ready, 2),
        "phases_s": seconds,
        **({} if late is None else {"late": finish(llm, late)}),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "kernels": len(built),
        "built_one_by_one": [one["seconds"] for one in built if not one["found"]],
        "graphs": graphs_of(runner),
        "tokens": [answer.answers[0].token_ids for answer in answers],
        "one_by_one": [one["kernel"] for one in built if not one["found"]],
    }


def graphs_of(runner: Any) -> list[int]:
    """Numbers of decode and prompt graphs."""
    return [] if runner.graphs is None else [len(runner.graphs._captured), len(runner.prompts.captured)]


def finish(llm: Any, late: Any) -> Record:
    """Do the rest of a warm-up, as an idle server does; seconds of all parts and of the longest."""
    seconds = []
    while late.left:
        began = time.perf_counter()
        llm._calls.loop.between_steps(late.do_part)
        seconds.append(time.perf_counter() - began)
    return {
        "parts": len(seconds),
        "all_s": round(sum(seconds), 2),
        "longest_s": round(max(seconds, default=0), 3),
    }


def kernels_built(triton: Any) -> list[Record]:
    """A list that grows with each kernel that this process builds, or finds in Triton's folder."""
    built: list[Record] = []

    def report(*, src: Any, times: Any, cache_hit: bool, **unused: Any) -> None:
        micros = times.ir_initialization + times.store_results + sum(one for _, one in times.lowering_stages)
        built.append({"kernel": src.name, "found": cache_hit, "seconds": round(micros / 1e6, 3)})

    triton.knobs.compilation.listener = report
    return built


def in_a_process(words: list[str], cache: Path) -> Record:
    done = subprocess.run(
        [sys.executable, __file__, *words, "--one", str(time.time())],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="an engine folder, or a config.json for random weights")
    parser.add_argument("--quant", default="none", help="of random weights")
    parser.add_argument("--dtype", default="fp16", help="of random weights")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cache-tokens", type=int, default=16384)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--before", action="store_true", help="as it was before kernels were built ahead")
    parser.add_argument("--at-once", action="store_true", help="with the whole warm-up before it is ready")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=float, help="one start, in this process, begun at this time")
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(start(given)))
        return
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(given.starts):
            records.append(in_a_process(sys.argv[1:], Path(cache)))
            print(json.dumps(records[-1]), flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps({"words": sys.argv[1:], "starts": records}, indent=1))


if __name__ == "__main__":
    main()
