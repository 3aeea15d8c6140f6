"""What penalties and log-probabilities cost a decode step, beside the same draws without them.

A config.json stands for a model of random weights. Every case decodes the same prompts in one batch, in turns
with the others; a figure is the median over runs of the time per step once every prompt has its first token.
``limit`` is the most that a case may add. The last line is JSON; the exit code is 1 beyond the limit.

    python benchmarks/penalties.py benchmarks/shapes/qwen3-8b.json --json docs/results/penalties.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot import LLM, SamplingParams
from ingot.bench.machine import machine

DRAWN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
CASES: dict[str, dict[str, Any]] = {
    "drawn": DRAWN,
    "repetition": DRAWN | {"repetition_penalty": 1.05},
    "every rule": DRAWN
    | {"repetition_penalty": 1.05, "presence_penalty": 0.5, "frequency_penalty": 0.1, "min_new_tokens": 999},
    "logprobs 5": DRAWN | {"logprobs": 5},
    "repetition, logprobs 5": DRAWN | {"repetition_penalty": 1.05, "logprobs": 5},
    "one of all": DRAWN,  # its first request alone has what "repetition, logprobs 5" has
}
LIMIT = 0.05


def asked(case: str, index: int, new_tokens: int) -> SamplingParams:
    """The values of one request of a case."""
    values = CASES["repetition, logprobs 5" if case == "one of all" and index == 0 else case]
    least = min(values.get("min_new_tokens", 0), new_tokens)
    return SamplingParams(
        max_new_tokens=new_tokens, seed=index, **{**values, "min_new_tokens": least, "ignore_eos": True}
    ).replace(stop_token_ids=(0,) if least else ())


def step_ms(llm: LLM, case: str, prompts: list[list[int]], new_tokens: int) -> float:
    """Milliseconds per step of a whole batch of decodes."""
    executor = llm.executor
    for i, prompt in enumerate(prompts):
        executor.add(f"{case}{i}", prompt, asked(case, i, new_tokens))
    started: set[str] = set()
    while len(started) < len(prompts):
        started |= {update.request_id for update in executor.step()}
    begin, steps = time.perf_counter(), 0
    for _ in range(new_tokens // 2):
        steps += bool(executor.step())
    seconds = time.perf_counter() - begin
    while executor.has_work:
        executor.step()
    return 1e3 * seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a config.json, or an engine")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = {"max_batch_size": args.batch, "max_seq_len": 2 * (args.prompt_tokens + args.new_tokens)}
    make: Any = LLM.from_config if args.model.suffix == ".json" else LLM
    llm: LLM = make(args.model, args.device, **sizes)
    vocab = llm.engine.manifest.model.vocab_size
    prompts = [
        [(7919 * i + 31 * j) % (vocab - 1) + 1 for j in range(args.prompt_tokens)] for i in range(args.batch)
    ]
    llm.warm_up([args.batch])
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for run in range(args.runs + 1):
        for case, found in times.items():
            ms = step_ms(llm, case, prompts, args.new_tokens)
            if run:  # the first compiles what a warm-up does not meet
                found.append(ms)
    middle = {case: statistics.median(found) for case, found in times.items()}
    added = {case: ms / middle["drawn"] - 1 for case, ms in middle.items()}
    for case, ms in middle.items():
        print(f"{case:<24} {ms:8.3f} ms  {added[case]:+.1%}")
    result = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(llm.engine.device),
        "batch": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "step_ms": times,
        "median_ms": middle,
        "added": added,
        "limit": LIMIT,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(1 if max(added.values()) > LIMIT else 0)


if __name__ == "__main__":
    main()
