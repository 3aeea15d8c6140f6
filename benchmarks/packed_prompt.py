"""Products of a prompt's rows with weights of 8 and of 4 bits: unpacked in the kernel, or widened first.

The four products of a LLaMA-3.1 8B layer, in microseconds (median of calls between events, over weights of
more bytes than L2 holds): the matrix library's with a weight in bf16, what ``packed_prompt`` replaces (the
weight is widened, then the library multiplies), and ``packed_prompt``. Then whole layers of the four
products, again and again for a second each, because the clock falls under steady products. Every product is
compared with float64 first.

    python benchmarks/packed_prompt.py --json docs/results/packed_prompt.json
    python benchmarks/packed_prompt.py --rows 512 2048 8192 --bits 4
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot.kernels.product.packed.packed_prompt import packed_prompt
from ingot.kernels.weight.dequantize import dequantize
from ingot.kernels.weight.stored_weight import StoredWeight, dequantized, num_rows, num_words
from ingot.measure.side.machine import machine

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMS = {8: (0, False), 4: (128, True)}  # columns per group, zeros
COPIES, CALLS, ROUNDS = 3, 12, 5
DTYPE = torch.bfloat16
Call = Callable[[int], Any]


def random_weight(outputs: int, width: int, bits: int) -> StoredWeight:
    """Random words, scales and zeros, so that outputs are of order one."""
    group, zeros = FORMS[bits]
    words = (num_rows(outputs), num_words(width, bits, group))
    values = torch.randint(-(1 << 15), 1 << 15, words, dtype=torch.int16, device="cuda")
    shape = (width // group, outputs) if group else (outputs,)
    scales = (torch.rand(shape, device="cuda") + 0.5) / width**0.5 / (4.6 if bits == 4 else 74)
    low = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, device="cuda") if zeros else None
    return StoredWeight(values, width, scales.to(DTYPE), low, bits, group)


def error(bits: int, rows: int, outputs: int, width: int) -> float:
    """Relative distance from float64, of a product that writes into poisoned memory."""
    x, weight = torch.randn(rows, width, device="cuda", dtype=DTYPE), random_weight(outputs, width, bits)
    exact = x.double() @ dequantized(weight, DTYPE if weight.group else torch.float64).double().T
    torch.full((rows, outputs), float("nan"), dtype=DTYPE, device="cuda")  # y takes its place
    return float((packed_prompt(x, weight).double() - exact).norm() / exact.norm())


def timed(call: Call, calls: int) -> float:
    """Microseconds per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for turn in range(calls):
        call(turn)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def ways(shape: str, rows: int, bits: list[int]) -> dict[str, Call]:
    """What is compared, by name."""
    outputs, width = SHAPES[shape]
    x = torch.randn(rows, width, device="cuda", dtype=DTYPE)
    dense = [torch.randn(outputs, width, device="cuda", dtype=DTYPE) / width**0.5 for _ in range(COPIES)]
    found: dict[str, Call] = {"dense": lambda turn: F.linear(x, dense[turn % COPIES])}
    for one in bits:
        own = [random_weight(outputs, width, one) for _ in range(COPIES)]
        found[f"widened_{one}"] = lambda turn, own=own: F.linear(x, dequantize(own[turn % COPIES], DTYPE))
        found[f"packed_{one}"] = lambda turn, own=own: packed_prompt(x, own[turn % COPIES])
    return found


def case(shape: str, rows: int, bits: list[int]) -> dict[str, Any]:
    """One shape's figures."""
    calls, (outputs, width) = ways(shape, rows, bits), SHAPES[shape]
    for call in calls.values():
        timed(call, 3)
    us: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            us[name].append(timed(call, CALLS))
    medians = {name: round(statistics.median(own), 1) for name, own in us.items()}
    tflops = {name: round(2e-6 * rows * outputs * width / own) for name, own in medians.items()}
    return {"shape": shape, "rows": rows, "us": medians, "tflop_s": tflops}


def steady(rows: int, bits: list[int], seconds: float) -> dict[str, float]:
    """Microseconds of a layer's four products, of the second half of ``seconds`` of nothing else."""
    layers = {shape: ways(shape, rows, bits) for shape in SHAPES}
    found = {}
    for name in layers["qkv"]:
        calls = [layers[shape][name] for shape in SHAPES]

        def layer(turn: int, calls: list[Call] = calls) -> None:
            for call in calls:
                call(turn)

        count = max(int(seconds * 5e5 / timed(layer, 5)), 1)
        timed(layer, count)
        found[name] = round(timed(layer, count), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way's steady layers")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(torch.device("cuda")),
    }
    record["errors"] = {
        f"{b} bits, {m} rows": error(b, m, 4096, 4096) for b in given.bits for m in (257, 2048)
    }
    print(record["errors"], flush=True)
    record["products"] = []
    for rows in given.rows:
        for shape in SHAPES:
            record["products"].append(case(shape, rows, given.bits))
            print(record["products"][-1], flush=True)
    record["steady_layer_us"] = {rows: steady(rows, given.bits, given.seconds) for rows in given.rows[-2:]}
    print(record["steady_layer_us"], flush=True)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
