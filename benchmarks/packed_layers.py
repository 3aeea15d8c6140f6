"""Products of a prompt's rows with weights of 8 and of 4 bits beside the same layer's in bf16.

The four products of a LLaMA-3.1 8B layer as prompts run them: output and down are added to the hidden states,
gate and up end with SiLU. In bf16 by the matrix library and ``prompt_gate_up``; in few bits by
``packed_prompt`` with the additions and SiLU in its kernel (``packed``), by kernels of their own (``apart``),
or widened for the library (``widened``). Medians of graphs, over weights and inputs of more bytes than L2
holds, all ways in random order; then whole layers of the four products and their norms. Every product is
compared with float64 first.

    python benchmarks/packed_layers.py --json docs/results/packed_layers.json
    python benchmarks/packed_layers.py --rows 512 2048 8192 --forms 4
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from timing import captured, replay_us

from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.product.packed.packed_prompt import add_packed_prompt, packed_prompt, packed_prompt_gate_up
from ingot.kernels.product.prompt_gate_up import prompt_gate_up
from ingot.kernels.weight.dequantize import dequantize
from ingot.kernels.weight.stored_weight import StoredWeight, dequantized, num_rows, num_words
from ingot.measure.side.machine import machine

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMS = {"8": (8, 0, False), "4": (4, 128, True), "4_sym": (4, 128, False), "4_by_32": (4, 32, True)}
COPIES = 3  # weights in turn, and two inputs
DTYPE = torch.bfloat16
Call = Callable[[torch.Tensor, Any, torch.Tensor], Any]  # rows, weight, hidden states


def random_weight(outputs: int, width: int, form: str) -> StoredWeight:
    """Random words, scales and zeros, so that outputs are of order one."""
    bits, group, zeros = FORMS[form]
    words = (num_rows(outputs), num_words(width, bits, group))
    values = torch.randint(-(1 << 15), 1 << 15, words, dtype=torch.int16, device="cuda")
    shape = (-(-width // group), outputs) if group else (outputs,)
    scales = (torch.rand(shape, device="cuda") + 0.5) / width**0.5 / (4.6 if bits == 4 else 74)
    low = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, device="cuda") if zeros else None
    return StoredWeight(values, width, scales.to(DTYPE), low, bits, group)


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda", dtype=DTYPE)


def error(form: str, rows: int, outputs: int, width: int) -> dict[str, float]:
    """Relative distances from float64, of products that write into poisoned memory."""
    x, weight, hidden = drawn(rows, width), random_weight(outputs, width, form), drawn(rows, outputs)
    exact = x.double() @ dequantized(weight, DTYPE if weight.group else torch.float64).double().T
    gated = F.silu(exact[:, : outputs // 2]) * exact[:, outputs // 2 :]
    wanted = {"plain": exact, "gated": gated, "added": exact + hidden.double()}
    torch.full((rows, 2 * outputs), float("nan"), dtype=DTYPE, device="cuda")  # results take its place
    found = {"plain": packed_prompt(x, weight), "gated": packed_prompt_gate_up(x, weight)}
    assert torch.equal(found["gated"], silu_mul(found["plain"]))
    found["added"] = add_packed_prompt(x, weight, None, hidden)
    return {
        name: float((y.double() - wanted[name]).norm() / wanted[name].norm()) for name, y in found.items()
    }


def ways_of(shape: str) -> dict[str, Call]:
    """By kind, how a layer multiplies."""
    if shape == "gate_up":
        return {
            "dense": lambda x, w, h: prompt_gate_up(x, w),
            "library": lambda x, w, h: silu_mul(F.linear(x, w)),
            "packed": lambda x, w, h: packed_prompt_gate_up(x, w),
            "apart": lambda x, w, h: silu_mul(packed_prompt(x, w)),
            "widened": lambda x, w, h: silu_mul(F.linear(x, dequantize(w, DTYPE))),
        }
    apart: dict[str, Call] = {"packed" if shape == "qkv" else "apart": lambda x, w, h: packed_prompt(x, w)}
    apart["widened"] = lambda x, w, h: F.linear(x, dequantize(w, DTYPE))
    if shape == "qkv":
        return {"dense": lambda x, w, h: F.linear(x, w)} | apart
    return {
        "dense": lambda x, w, h: h.addmm_(x, w.t()),
        "packed": lambda x, w, h: add_packed_prompt(x, w, None, h),
    } | apart


def medians(calls: dict[str, list[Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Microseconds per call of each graph, all of them in random order every round."""
    graphs = {name: captured(own) for name, own in calls.items()}
    us: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name in random.sample(list(graphs), len(graphs)):
            taken = replay_us(graphs[name]) / len(calls[name])
            us[name] += [taken] if turn else []
    return {name: round(statistics.median(own), 1) for name, own in us.items()}


def case(shape: str, rows: int, forms: Iterable[str], rounds: int) -> dict[str, Any]:
    """One shape's figures."""
    outputs, width = SHAPES[shape]
    xs, hs = [drawn(rows, width) for _ in range(2)], [drawn(rows, outputs) for _ in range(2)]
    weights: dict[str, list[Any]] = {"": [drawn(outputs, width) / width**0.5 for _ in range(COPIES)]}
    weights |= {form: [random_weight(outputs, width, form) for _ in range(COPIES)] for form in forms}
    calls = {}
    for kind, call in ways_of(shape).items():
        for form in [""] if kind in ("dense", "library") else forms:
            own = weights[form]
            calls[f"{kind}_{form}".rstrip("_")] = [
                lambda c=call, w=own, t=turn: c(xs[t % 2], w[t % COPIES], hs[t % 2])
                for turn in range(2 * COPIES)
            ]
    us = medians(calls, rounds)
    tflops = {name: round(2e-6 * rows * outputs * width / own) for name, own in us.items()}
    return {"shape": shape, "rows": rows, "us": us, "tflop_s": tflops}


def layer(ways: dict[str, Call], weights: dict[str, Any], x: torch.Tensor, hidden: torch.Tensor) -> None:
    """A layer's products and norms, with the queries in place of attention's result."""
    norm, own = torch.ones_like(hidden[0]), dict(weights)

    def joined(name: str, inner: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = ways[name](inner, own[name], hidden)
        return rms_norm(y, norm, 1e-5, None if y is hidden else hidden)

    heads = ways["qkv"](x, own["qkv"], hidden)[:, : x.shape[1]]
    rows, hidden = joined("o", heads, hidden)
    joined("down", ways["gate_up"](rows, own["gate_up"], hidden), hidden)


def layers(rows: int, forms: Iterable[str], rounds: int) -> dict[str, float]:
    """Microseconds of a layer's products and norms."""
    x, hidden, calls = drawn(rows, 4096), drawn(rows, 4096), {}
    for kind in ("dense", "packed", "apart", "widened"):
        ways = {shape: ways_of(shape).get(kind, ways_of(shape).get("packed")) for shape in SHAPES}
        for form in [""] if kind == "dense" else forms:
            own = [
                {
                    shape: random_weight(*size, form) if form else drawn(*size) / size[1] ** 0.5
                    for shape, size in SHAPES.items()
                }
                for _ in range(COPIES)
            ]
            calls[f"{kind}_{form}".rstrip("_")] = [lambda s=ways, w=w: layer(s, w, x, hidden) for w in own]
    return medians(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=["8", "4"], help="bits, zeros and groups"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    record: dict[str, Any] = {"command": shlex.join(["python", *sys.argv])}
    record["machine"] = machine(torch.device("cuda"))
    record["errors"] = {
        f"{form}, {rows} rows": error(form, rows, 4096, 4096) for form in given.forms for rows in (257, 2048)
    }
    print(record["errors"], flush=True)
    record["layer_us"], record["products"] = {}, []
    for rows in given.rows:
        record["layer_us"][str(rows)] = layers(rows, given.forms, given.rounds)
        print(rows, record["layer_us"][str(rows)], flush=True)
        for shape in SHAPES:
            record["products"].append(case(shape, rows, given.forms, given.rounds))
            print(record["products"][-1], flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
