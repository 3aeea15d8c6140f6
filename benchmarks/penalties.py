"""What penalties, a bias, log-probabilities and grammars cost a decode step, beside the same draws without.

A config.json stands for a model of random weights. Every case decodes the same prompts in one batch, in turns
with the others; a figure is the median over runs of the time between two tokens of the second request, once
every prompt has its first. In cases of one, only the first request has what the case names: the figure is
what others pay. ``one grammar`` is a stand-in that takes 100 µs, ``one regex`` llguidance's where it is
installed (half_matcher.py). ``limits`` are the most that cases may add. The last line is JSON; the exit code
is 1 beyond a limit.

    python benchmarks/penalties.py benchmarks/shapes/qwen3-8b.json --json docs/results/penalties.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.half_matcher import HalfMatcher, text_matcher
from ingot import LLM, SamplingParams
from ingot.measure.side.machine import machine
from ingot.text.grammar.grammar_compiler import GrammarMatcher

DRAWN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
CASES: dict[str, dict[str, Any]] = {
    "drawn": DRAWN,
    "repetition": DRAWN | {"repetition_penalty": 1.05},
    "every rule": DRAWN
    | {"repetition_penalty": 1.05, "presence_penalty": 0.5, "frequency_penalty": 0.1, "min_new_tokens": 999},
    "logprobs 5": DRAWN | {"logprobs": 5},
    "repetition, logprobs 5": DRAWN | {"repetition_penalty": 1.05, "logprobs": 5},
}
BIAS = {i: (-1.0) ** i for i in range(0, 90, 3)}
ONE: dict[str, dict[str, Any]] = {
    "one of all": CASES["repetition, logprobs 5"],
    "one bias": DRAWN | {"logit_bias": BIAS},
    "one grammar": DRAWN,
    "one regex": DRAWN,
}
MATCHERS: dict[str, Callable[[int], GrammarMatcher]] = {
    "one grammar": HalfMatcher,
    "one regex": text_matcher,
}
LIMITS = dict.fromkeys(CASES, 0.05) | dict.fromkeys(ONE, 0.02) | {"one of all": 0.05}


def asked(case: str, index: int, new_tokens: int) -> SamplingParams:
    """The values of one request of a case."""
    values = (ONE[case] if index == 0 else DRAWN) if case in ONE else CASES[case]
    least = min(values.get("min_new_tokens", 0), new_tokens)
    return SamplingParams(
        max_new_tokens=new_tokens, seed=index, **{**values, "min_new_tokens": least, "ignore_eos": True}
    ).replace(stop_token_ids=(0,) if least else ())


def step_ms(
    llm: LLM, case: str, prompts: list[list[int]], new_tokens: int, matcher: GrammarMatcher | None
) -> float:
    """Milliseconds per token of the second request, in a whole batch of decodes."""
    executor, other = llm.executor, f"{case}1"
    for i, prompt in enumerate(prompts):
        own = matcher if i == 0 else None
        executor.add(f"{case}{i}", prompt, asked(case, i, new_tokens), matcher=own)
    started: set[str] = set()
    while len(started) < len(prompts):
        started |= {update.request_id for update in executor.step()}
    begin, tokens = time.perf_counter(), 0
    while tokens < new_tokens // 2:
        tokens += sum(update.request_id == other for update in executor.step())
    seconds = time.perf_counter() - begin
    while executor.has_work:
        executor.step()
    return 1e3 * seconds / tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a config.json, or an engine")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32, help="2 or more")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = {"max_batch_size": args.batch, "max_seq_len": 2 * (args.prompt_tokens + args.new_tokens)}
    opened: Any = LLM.from_config if args.model.suffix == ".json" else LLM
    llm: LLM = opened(args.model, args.device, **sizes)
    vocab = llm.engine.manifest.model.vocab_size
    prompts = [
        [(7919 * i + 31 * j) % (vocab - 1) + 1 for j in range(args.prompt_tokens)] for i in range(args.batch)
    ]
    llm.warm_up([args.batch])
    known = importlib.util.find_spec("llguidance") is not None
    matchers = {case: make(vocab) for case, make in MATCHERS.items() if known or case != "one regex"}
    cases = [*CASES, *(case for case in ONE if case in matchers or case not in MATCHERS)]
    times: dict[str, list[float]] = {case: [] for case in cases}
    for run in range(args.runs + 1):
        for case, found in times.items():
            ms = step_ms(llm, case, prompts, args.new_tokens, matchers.get(case))
            if run:  # the first compiles what a warm-up does not meet
                found.append(ms)
    middle = {case: statistics.median(found) for case, found in times.items()}
    added = {case: ms / middle["drawn"] - 1 for case, ms in middle.items()}
    for case, ms in middle.items():
        print(f"{case:<24} {ms:8.3f} ms  {added[case]:+.1%}")
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(llm.engine.device),
        "batch": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "step_ms": times,
        "median_ms": middle,
        "added": added,
        "limits": {case: LIMITS[case] for case in cases},
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(1 if any(added[case] > LIMITS[case] for case in cases) else 0)


if __name__ == "__main__":
    main()
