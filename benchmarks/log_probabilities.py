"""Log-probabilities of a decode step on the GPU: 20 likeliest tokens and the chosen one of each row.

A figure is one call in a CUDA graph of twelve, each on bf16 logits of its own; medians over replays. Every
case is first compared bit for bit with the runtime's reference. ``--before FILE`` also times ``logprobs`` of
another version of ``ingot/kernels/sampling/row_logprobs.py``.

    python benchmarks/log_probabilities.py --json docs/results/log_probabilities.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import graph_us

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot.kernels.sampling.row_logprobs import greedy_logprobs, logprobs
from ingot.kernels.sampling.token_draw import greedy
from ingot.measure.side.machine import machine
from ingot.runtime.sampling.token_logprobs import NARROW_WIDTH, ROW_WIDTH, leave_logprobs_reference

COPIES = 12
Call = Callable[[torch.Tensor], Any]


def figure(call: Call, logits: list[torch.Tensor]) -> float:
    """Median microseconds of one call."""
    return round(statistics.median(graph_us([partial(call, one) for one in logits], 20)) / len(logits), 2)


def poisoned(rows: int) -> torch.Tensor:
    return torch.full((rows, ROW_WIDTH), -77.0, dtype=torch.float64, device="cuda")


def check(logits: torch.Tensor, token_ids: torch.Tensor) -> bool:
    """Whether both functions leave the reference's bits."""
    found, expected = poisoned(len(logits)), poisoned(len(logits))
    logprobs(logits, token_ids, found)
    leave_logprobs_reference(logits, token_ids, expected)
    same = torch.equal(found, expected)
    found = poisoned(len(logits))
    best, _ = greedy_logprobs(logits, found)
    leave_logprobs_reference(logits, logits.argmax(-1), expected)
    return same and torch.equal(found, expected) and torch.equal(best, logits.argmax(-1))


def measure(rows: int, vocabulary: int, before: Callable[..., None] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (rows, vocabulary)
    logits = [(torch.randn(shape, device="cuda") * 2.5).bfloat16() for _ in range(COPIES)]
    token_ids = torch.arange(rows, device="cuda") * 997 % vocabulary
    uneven = logits[0].clone()
    uneven[:, :16384] += 4  # a vocabulary whose first tokens are the common ones
    cases = [*logits[:2], uneven, logits[0].round(), torch.zeros_like(uneven)]
    out = poisoned(rows)
    calls: dict[str, Call] = {
        "greedy": greedy,
        "greedy_logprobs": lambda one: greedy_logprobs(one, out),
        "logprobs": lambda one: logprobs(one, token_ids, out),
        "logprobs of the chosen": lambda one: logprobs(one, token_ids, out[:, :NARROW_WIDTH]),
    }
    if before is not None:
        calls["logprobs before"] = lambda one: before(one, token_ids, out)
    found: dict[str, Any] = {"equal": all(check(one, token_ids) for one in cases)}
    found |= {f"{name} us": figure(call, logits) for name, call in calls.items()}
    found["greedy_logprobs, uneven us"] = figure(calls["greedy_logprobs"], [uneven] * COPIES)
    print(rows, vocabulary, json.dumps(found), flush=True)
    return found


def older(file: Path) -> Callable[..., None]:
    """``logprobs`` of another version of its module."""
    spec = importlib.util.spec_from_file_location("older_row_logprobs", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.logprobs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--vocabularies", default="128256,151936")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    before = older(given.before) if given.before else None
    sizes = [[int(part) for part in text.split(",")] for text in (given.vocabularies, given.rows)]
    found = {
        "command": shlex.join(["python", *sys.argv]),
        "results": {f"{b}x{v}": measure(b, v, before) for v in sizes[0] for b in sizes[1]},
        "machine": machine(torch.device("cuda")),
    }
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
