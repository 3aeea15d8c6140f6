"""The gate and up product with its activation inside, beside the library's and `silu_mul`, by rows, of many
weights in turn; and errors of both against float64.

    python benchmarks/prompt_gate_up.py --json out.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.product.prompt_gate_up import prompt_gate_up

SHAPES = {"llama31-8b": (4096, 14336), "llama-7b": (4096, 11008), "qwen25-1.5b": (1536, 8960)}
SIZES = (256, 512, 768, 1024, 1536, 2048, 2176, 4096, 8192)
TOTAL = 32768  # rows of a measurement


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


def by_library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_mul(x @ weight.t())


def errors(weight: torch.Tensor, rows: int) -> dict[str, float]:
    """Largest errors of some rows over the largest value, and whether memory that was NaN is all written."""
    x, inner = drawn(rows, weight.shape[1]), len(weight) // 2
    some = torch.tensor([0, 1, 63, 64, 127, rows // 2 + 1, rows - 1], device="cuda")
    sums = x[some].double() @ weight.double().t()
    true = torch.nn.functional.silu(sums[:, :inner]) * sums[:, inner:]
    torch.empty(4 * rows, inner, device="cuda", dtype=weight.dtype).fill_(float("nan"))
    found = {"gated": prompt_gate_up(x, weight), "library": by_library(x, weight)}
    worst = {
        name: float((y[some].double() - true).abs().max() / true.abs().max()) for name, y in found.items()
    }
    apart = (found["gated"].double() - found["library"].double()).abs().max() / true.abs().max()
    again = torch.equal(found["gated"], prompt_gate_up(x, weight))
    alone = torch.equal(found["gated"][64:], prompt_gate_up(x[64:], weight))
    return worst | {
        "apart": float(apart),
        "same_bits": float(again),
        "same_bits_in_another_place": float(alone),
    }


def milliseconds(
    call: Callable[[torch.Tensor, torch.Tensor], Any], weights: Sequence[torch.Tensor], rows: int, total: int
) -> float:
    """Of all weights' products of ``total`` rows."""
    xs = [drawn(rows, weights[0].shape[1]) for _ in range(3)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(xs[0], weights[0])
    begin.record()
    for turn in range(total // rows):
        for weight in weights:
            call(xs[turn % 3], weight)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * total / (total // rows * rows)


@torch.inference_mode()
def compared(
    weights: Sequence[torch.Tensor], sizes: Sequence[int], rounds: int = 3, total: int = TOTAL
) -> dict[str, Any]:
    """By rows: medians of both ways in turn, and errors."""
    found: dict[str, Any] = {}
    for rows in sizes:
        try:
            times: dict[str, list[float]] = {"gated": [], "library": []}
            for _ in range(rounds):
                times["library"].append(milliseconds(by_library, weights, rows, total))
                times["gated"].append(milliseconds(prompt_gate_up, weights, rows, total))
            ms = {name: round(statistics.median(t), 2) for name, t in times.items()}
            found[str(rows)] = ms | {"errors": errors(weights[0], rows - 3)}
        except Exception as error:  # one failure does not lose the rest
            found[str(rows)] = repr(error)[:300]
        print(rows, json.dumps(found[str(rows)]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, (size, inner) in SHAPES.items():
        print(name, flush=True)
        weights = [drawn(2 * inner, size) * size**-0.5 for _ in range(args.layers)]
        found[name] = compared(weights, SIZES, args.rounds, TOTAL // 2)
        del weights
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
