"""Which tiles the products of a narrow model's decode steps should have: timed inside the whole step.

A model of a Whisper's widths with few layers decodes with 1 or 64 windows, as a CUDA graph. Each product in
turn (by op, outputs and inputs) takes each of its candidates, among them the matrix library where weights are
dense; what makes the step faster stays for the next product. Candidates are replayed in turn beside what
stands, so that the GPU's clocks favour none, and each one's logits are compared with the first step's. All
kernels are compiled by as many processes as there are cores, before.

    python benchmarks/narrow_steps.py large-v3/none:64 large-v3/w8a8:1 small/none:64 --json narrow.json
    python benchmarks/narrow_steps.py tiny/w8a8:1 tiny/none:3 --dry       # on a CPU: tries the script
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from timing import replay_us  # noqa: E402
from whisper import SHAPES  # noqa: E402

from ingot import LLM  # noqa: E402
from ingot.config.runtime_config import RuntimeConfig  # noqa: E402
from ingot.kernels.product.few_rows import resolved_launch  # noqa: E402
from ingot.layers import cross_attention  # noqa: E402
from ingot.layers.products import layer_products, product_choice  # noqa: E402
from ingot.layers.products.product_choice import ALL, NONE, ProductChooser  # noqa: E402
from ingot.measure.bench.profile.profiled_step import ReadyStep, ready_step  # noqa: E402
from ingot.runtime.step.graphs import DecodeGraphs  # noqa: E402

Tiles = dict[str, int]
Key = tuple[str, int, int]  # linear, qkv or parts; outputs, inputs
Choice = Tiles | None  # None: by the matrix library
NAMES_MATRIX = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH", "SPLITS")
NAMES_STRAIGHT = ("BLOCK_N", "num_warps", "FRAGMENTS", "SPLITS")
# fmt: off
# ruff: noqa: E501
ONE_INT8 = {
    "linear": [(16, 256, 1, 5, 0, 1), (16, 256, 2, 5, 0, 1), (16, 256, 4, 5, 0, 1), (16, 512, 4, 3, 0, 1),
               (32, 256, 4, 5, 0, 1), (32, 512, 4, 3, 0, 1), (16, 1024, 4, 2, 0, 1)],
    "qkv": [(16, 256, 2, 5, 0, 1), (32, 256, 4, 5, 0, 1), (32, 512, 4, 3, 0, 1), (16, 512, 4, 3, 0, 1),
            (64, 256, 4, 4, 0, 1)],
    "parts": [(16, 256, 2, 5, 0, 1, 1), (16, 256, 2, 3, 0, 1, 2), (32, 256, 2, 3, 0, 1, 5),
              (16, 256, 2, 4, 0, 1, 4), (32, 256, 4, 3, 0, 1, 2), (32, 256, 4, 4, 0, 1, 8),
              (64, 256, 4, 2, 0, 1, 5), (16, 512, 4, 3, 0, 1, 1), (16, 512, 2, 3, 0, 1, 4)],
}
ONE_STRAIGHT = {
    "linear": [(16, 4, 1, 1), (16, 2, 1, 1), (16, 8, 1, 1), (32, 8, 1, 1), (32, 2, 1, 1)],
    "qkv": [(32, 2, 1, 1), (32, 8, 1, 1), (64, 4, 1, 1)],
    "parts": [(16, 4, 1, 1), (16, 2, 1, 2), (32, 4, 1, 2), (32, 2, 1, 5), (16, 2, 1, 4), (16, 4, 1, 4),
              (32, 4, 1, 4), (16, 8, 1, 1)],
}
MANY_DENSE = {
    "linear": [(32, 128, 4, 4, 0, 0), (32, 128, 4, 4, 0, 1), (64, 64, 4, 5, 0, 0), (64, 128, 4, 4, 0, 0),
               (16, 128, 4, 4, 0, 0), (16, 256, 4, 3, 0, 0), (64, 64, 4, 5, 1, 0)],
    "qkv": [(32, 128, 4, 4, 0, 0), (64, 64, 4, 5, 0, 0), (64, 128, 4, 4, 0, 0), (32, 128, 4, 4, 0, 1),
            (64, 128, 4, 4, 0, 128)],
    "parts": [(64, 64, 4, 5, 0, 0, 4), (64, 128, 4, 3, 0, 0, 5), (32, 128, 4, 4, 0, 0, 2), (32, 128, 4, 4, 0, 0, 4),
              (128, 64, 4, 5, 0, 0, 5), (64, 64, 4, 5, 0, 0, 8), (64, 128, 4, 3, 0, 128, 5), (64, 128, 4, 3, 0, 0, 2)],
}
MANY_INT8 = {
    "linear": [(32, 256, 4, 4, 0, 0), (64, 128, 4, 5, 0, 0), (64, 256, 4, 3, 0, 0), (16, 256, 4, 4, 0, 0)],
    "qkv": [(32, 256, 4, 4, 0, 0), (64, 128, 4, 5, 0, 0), (64, 256, 4, 3, 0, 0)],
    "parts": [(64, 256, 4, 2, 0, 0, 5), (32, 256, 4, 3, 0, 0, 2), (32, 256, 4, 3, 0, 0, 4), (128, 128, 4, 4, 0, 0, 5)],
}
MANY_PARTS: list[Tiles] = [{"BLOCK_M": 64, "SPLITS": splits} for splits in (2, 5, 8)]  # of many rows
CROSS: list[Tiles] = [
    {"MAX_SPLITS": 12}, {"MAX_SPLITS": 6}, {"MAX_SPLITS": 24}, {"MAX_SPLITS": 4}, {"MAX_SPLITS": 3, "PREFETCH": 1},
    {"MAX_SPLITS": 6, "PREFETCH": 1}, {"MAX_SPLITS": 12, "PREFETCH": 1}, {"OVERLAP": 2},
    {"BLOCK_N": 64, "num_warps": 1, "MAX_SPLITS": 12}, {"BLOCK_N": 64, "num_warps": 1, "MAX_SPLITS": 6},
    {"BLOCK_N": 64, "num_warps": 2, "MAX_SPLITS": 12}, {"BLOCK_N": 64, "num_warps": 2, "MAX_SPLITS": 6},
    {"BLOCK_N": 64, "num_warps": 2, "MAX_SPLITS": 3, "PREFETCH": 1}, {"BLOCK_N": 128, "num_warps": 4, "MAX_SPLITS": 6},
    {"BLOCK_N": 16, "num_warps": 1, "MAX_SPLITS": 12, "PREFETCH": 1}, {"BLOCK_N": 64, "num_warps": 1, "MAX_SPLITS": 2},
]
STANDING: dict[Key, Choice] = {}  # over the defaults, while a step is captured
DEFAULTS = resolved_launch.small_tiles, resolved_launch.split_tiles, resolved_launch.small_int8_tiles


def candidates(quant: str, rows: int, key: Key) -> list[Choice]:
    """What a product may take."""
    op, dense = key[0], quant == "none"
    if op == "cross":
        return list(CROSS) if rows > 8 and dense else []
    if quant == "w8a16":
        return [dict(zip(NAMES_STRAIGHT, one, strict=True)) for one in ONE_STRAIGHT[op]]
    table = MANY_DENSE if dense else ONE_INT8 if rows <= 8 else MANY_INT8
    found: list[Choice] = [dict(zip(NAMES_MATRIX, one, strict=False)) for one in table[op]]
    if dense:
        return [None, *found]
    return [*found, *MANY_PARTS] if rows > 8 and op == "parts" else found


def op_of(name: str, outputs: int, inputs: int) -> Key:
    """The key of a linear layer of the decoder by the chooser's name."""
    return (
        {"o": "parts", "down": "parts", "qkv": "qkv" if outputs != inputs else "linear"}.get(name, "linear"),
        outputs,
        inputs,
    )


def patch() -> None:
    """Let what stands override tiles, and which products the matrix library computes."""
    whole, split, int8 = DEFAULTS

    def over(tiles: Tiles, key: Key) -> Tiles:
        return tiles | (STANDING.get(key) or {})

    def small_tiles(rows: int, weight: Any, itemsize: int, device: torch.device, *rest: bool) -> Tiles:
        found = whole(rows, weight, itemsize, device, *rest)
        return over(found, _named(weight.out_features, weight.in_features))

    def split_tiles(rows: int, weight: Any, itemsize: int, device: torch.device) -> Tiles:
        return over(split(rows, weight, itemsize, device), ("parts", weight.out_features, weight.in_features))

    def small_int8(rows: int, outputs: int, width: int, device: torch.device, group: int = 0,
                   split: bool = False, four_bits: bool = False) -> Tiles:  # fmt: skip
        found = int8(rows, outputs, width, device, group, split, four_bits)
        return over(found, ("parts", outputs, width) if split else _named(outputs, width))

    resolved_launch.small_tiles, resolved_launch.split_tiles = small_tiles, split_tiles
    resolved_launch.small_int8_tiles = small_int8
    in_parts = layer_products.int8_linear_parts

    def int8_linear_parts(x: Any, weight: Any) -> Any:
        key = "parts", len(weight.scales), x.values.shape[1]
        return in_parts(x, weight, STANDING.get(key) if len(x.values) > 8 else None)

    layer_products.int8_linear_parts = int8_linear_parts
    attend = cross_attention.paged_attention

    def paged_attention(q: Any, *given: Any, **named: Any) -> Any:
        return attend(q, *given, **named, tiles=STANDING.get(("cross", *q.shape[1:])))

    cross_attention.paged_attention = paged_attention
    decoding = ProductChooser._decoding

    def chosen(self: ProductChooser, name: str, linear: Any, rows: int, norm: Any) -> Any:
        key = op_of(name, linear.out_features, linear.in_features)
        if key in STANDING and rows > 8 and linear.stored().bits == 16:
            self.dense = ((64, NONE if STANDING[key] is None else ALL),)
        else:
            self.dense = product_choice.PLAIN_ROWS
        return decoding(self, name, linear, rows, norm)

    ProductChooser._decoding = chosen  # type: ignore[method-assign]


def _named(outputs: int, inputs: int) -> Key:
    return "qkv" if outputs == 3 * inputs else "linear", outputs, inputs


@contextmanager
def standing(choices: dict[Key, Choice]) -> Iterator[None]:
    """Inside, products take these choices."""
    STANDING.clear()
    STANDING.update(choices)
    resolved_launch._float_launch.cache_clear()
    resolved_launch._int8_launch.cache_clear()
    try:
        yield
    finally:
        STANDING.clear()


class Bench:
    """A model that decodes with so many windows."""

    def __init__(self, name: str, quant: str, rows: int, layers: int, device: str) -> None:
        config = json.loads((SHAPES / f"whisper-{name}.json").read_text(encoding="utf-8"))
        config |= {"decoder_layers": layers, "num_hidden_layers": layers, "encoder_layers": 1}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(config), encoding="utf-8")
            dtype = "fp16" if device == "cuda" else "fp32"
            room = RuntimeConfig(cache_tokens=max(64 * rows, 512))  # processes share the GPU
            self.llm = LLM.from_config(
                file, device, dtype=dtype, quant=quant, max_batch_size=rows, runtime=room
            )
        self.layers, self.rows, self.quant = layers, rows, quant
        side: Any = SimpleNamespace(llm=self.llm, vocab_size=self.llm.engine.manifest.model.vocab_size)
        self.step: ReadyStep = ready_step(side, "decode", rows, 8)
        self.runner = self.step.runner

    def keys(self) -> list[Key]:
        layer: Any = self.runner.model.layers[0]
        linears = [
            ("qkv", layer.self_attn.qkv_proj), ("qkv", layer.encoder_attn.q_proj), ("o", layer.self_attn.o_proj),
            ("gate_up", layer.mlp.up_proj), ("down", layer.mlp.down_proj),
        ]  # fmt: skip
        found = [op_of(name, linear.out_features, linear.in_features) for name, linear in linears]
        config = self.runner.model.config
        return [("cross", config.num_heads, config.head_dim), *found]

    def eager(self, choices: dict[Key, Choice]) -> torch.Tensor:
        """Logits of a step that is launched kernel by kernel."""
        with standing(choices):
            self.runner.forward._operations.clear()
            with self.step.launched():
                return self.step.outputs()

    def captured(self, choices: dict[Key, Choice]) -> tuple[Callable[[], float], torch.Tensor]:
        """A replay's µs, and logits."""
        with standing(choices):
            self.runner.forward._operations.clear()
            if self.runner.device.type != "cuda":
                begun = time.perf_counter()
                logits = self.step.outputs()
                return lambda: 1e6 * (time.perf_counter() - begun), logits
            parts = (
                self.runner.forward,
                self.runner.feed,
                self.runner.device,
                self.rows,
                self.runner.max_seq_len,
            )
            self.runner.graphs = graphs = DecodeGraphs(*parts)
            logits = self.step.outputs()
        graph = next(iter(graphs._captured.values())).graph

        def replay() -> float:
            assert graphs is not None
            return replay_us(graph)

        return replay, logits


def compile_share(rank: int, ranks: int, cases: list[tuple[str, str, int]]) -> list[str]:
    """Build this process's share of all kernels; returns what does not run."""
    torch.set_num_threads(1)
    failed = []
    for case in cases:
        try:
            bench = Bench(*case, 1, "cuda")
            jobs = [(key, one) for key in dict.fromkeys(bench.keys()) for one in candidates(*case[1:], key)]
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__} {str(error)[:100]}")
            continue
        for key, one in jobs[rank::ranks]:
            try:
                bench.eager({key: one})
            except Exception as error:
                failed.append(f"{case} {key} {one}: {type(error).__name__}")
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    return failed


def sweep(name: str, quant: str, rows: int, given: argparse.Namespace) -> dict[str, Any]:
    """A case: what each product should take."""
    bench = Bench(name, quant, rows, given.layers, "cpu" if given.dry else "cuda")
    found: dict[str, Any] = {
        "shape": name,
        "quant": quant,
        "rows": rows,
        "layers": given.layers,
        "products": [],
    }
    best: dict[Key, Choice] = {}
    first = bench.captured({})[1]
    for key in dict.fromkeys(bench.keys()):
        ways: list[tuple[Choice | str, Callable[[], float], float]] = []
        for one in ["stands", *candidates(quant, rows, key)]:
            try:
                replay, logits = bench.captured(best if one == "stands" else {**best, key: one})
            except Exception as error:
                print(f"does not run: {key} {one}: {type(error).__name__} {str(error)[:80]}", flush=True)
                continue
            ways.append((one, replay, float((logits - first).norm() / first.norm())))
        times: list[list[float]] = [[] for _ in ways]
        for turn in range(given.rounds + 3):
            for (_, replay, _), mine in zip(ways, times, strict=True):
                us = replay()
                if turn >= 3:
                    mine.append(us)
        rows_of = [
            {
                "tiles": one,
                "us_a_layer": round(statistics.median(mine) / given.layers, 2),
                "apart": round(apart, 5),
            }
            for (one, _, apart), mine in zip(ways, times, strict=True)
        ]
        rows_of.sort(key=lambda row: row["us_a_layer"])
        stands = next(row for row in rows_of if row["tiles"] == "stands")
        right = [row for row in rows_of if row["apart"] < 0.02]
        if right and right[0]["us_a_layer"] < stands["us_a_layer"] - 0.05:
            best[key] = right[0]["tiles"]
        found["products"].append({"key": key, "stands": stands["us_a_layer"], "tried": rows_of})
        print(f"{name} {quant} {rows} rows {key}: stands {stands['us_a_layer']}", flush=True)
        for row in rows_of[:6]:
            print(f"    {row}", flush=True)
    ends: dict[str, list[float]] = {"before": [], "after": []}
    replays = {side: bench.captured(choices)[0] for side, choices in (("before", {}), ("after", best))}
    for _, (side, replay) in itertools.product(range(given.rounds + 3), replays.items()):
        ends[side].append(replay())
    found["step_us"] = {side: round(statistics.median(us[3:]), 1) for side, us in ends.items()}
    found["best"] = [{"key": key, "tiles": one} for key, one in best.items()]
    print(f"{name} {quant} {rows} rows: {found['step_us']} {found['best']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", metavar="SHAPE/QUANT:ROWS")
    parser.add_argument("--processes", type=int, default=14, help="that compile; each takes 3 GB of the GPU")
    parser.add_argument("--compile-s", type=float, default=70, help="seconds of compiling at most")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds after which no case begins")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    begun = time.monotonic()
    cases = [(name, case.split(":")[0], int(case.split(":")[1])) for name, case in
             (one.split("/") for one in given.cases)]  # fmt: skip
    patch()
    if not given.dry:
        pool = ProcessPoolExecutor(given.processes, multiprocessing.get_context("fork"))
        jobs = [pool.submit(compile_share, rank, given.processes, cases) for rank in range(given.processes)]
        ended, late = wait(jobs, timeout=given.compile_s)
        failed = [one for job in ended for one in ([str(job.exception())] if job.exception() else job.result())]
        for process in list(pool._processes.values()):  # theirs is memory of the GPU
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        failed += [f"{len(late)} were late"] if late else []
        print(f"compiled at {time.monotonic() - begun:.0f} s; {failed}", flush=True)
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": "none" if given.dry else torch.cuda.get_device_name(),
        "cases": [],
    }
    for case in cases:
        if time.monotonic() - begun > given.limit_s:
            break
        try:
            record["cases"].append(sweep(*case, given))
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {str(error)[:500]}", flush=True)
        print(f"{case} ended at {time.monotonic() - begun:.0f} s", flush=True)
        gc.collect()
        if given.json:
            given.json.write_text(json.dumps(record, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
