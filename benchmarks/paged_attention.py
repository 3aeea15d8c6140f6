"""Decode attention over the paged cache at shapes of 7B models: µs, GB/s, share of the read ceiling.

Each shape runs as one CUDA graph over the caches of as many layers as 2 GB hold, so that nothing comes from
the L2 cache, beside PyTorch's attention over contiguous keys of the same lengths. ``--sweep`` times every
candidate tile as well.

    python benchmarks/paged_attention.py --sweep --json docs/results/paged_attention.json
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from timing import READ_GB_S, compact, graph_us

from ingot.kernels.attention.attention_arguments import Scoring, Sequences
from ingot.kernels.attention.paged_attention import candidate_tiles, paged_attention
from ingot.kernels.cache.paged_cache import PagedCache

BLOCK, LONGEST, BUDGET = 64, 4096, 2.2e9


@dataclass(frozen=True)
class Shape:
    """Requests of one length; all heads of one layer. ``ragged``: of lengths from 1 to 2 * context - 1."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    ragged: bool = False

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one layer in fp16."""
        return 4 * self.batch * self.context * self.kv_heads * self.head_dim


SHAPES = [
    *(Shape(32, 32, 128, 1, context) for context in (640, 2048, 4096, 8192, 32768)),
    *(Shape(32, 32, 128, 2, context) for context in (640, 4096)),
    *(Shape(32, 32, 128, batch, 640) for batch in (4, 8, 16, 32, 64, 128)),
    *(Shape(32, 32, 128, batch, 576) for batch in (32, 64)),
    Shape(32, 32, 128, 8, 2048),
    Shape(32, 32, 128, 64, 640, ragged=True),
    *(Shape(32, 32, head_dim, 32, 640) for head_dim in (64, 80, 96)),
    *(Shape(16, 16, 64, batch, 640) for batch in (1, 4)),
    *(Shape(32, 8, 128, 1, context) for context in (640, 2048, 4096, 8192, 32768)),
    *(Shape(32, 8, 128, batch, 640) for batch in (2, 4, 8, 32, 64, 128)),
    *(Shape(32, 8, 128, batch, context) for batch, context in ((8, 8192), (32, 2048), (64, 576))),
    Shape(32, 8, 128, 64, 640, ragged=True),
    Shape(32, 4, 128, 32, 2048),
    *(
        Shape(32, kv_heads, 128, *size)
        for kv_heads in (8, 4)
        for size in ((8, 16384), (64, 2048), (32, 8192))
    ),
    Shape(32, 4, 128, 64, 2048, ragged=True),
]


class Layers:
    """Random paged caches of several layers, and the same number of contiguous keys and values."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        device = "cuda"
        options: dict[str, Any] = {"dtype": torch.float16, "device": device}
        longest = shape.context * (2 if shape.ragged else 1)
        self.shape, self.longest, blocks = shape, max(LONGEST, longest), -(-longest // BLOCK)
        self.copies = max(min(int(BUDGET // shape.cache_bytes), 32), 2)
        paged = (shape.batch * blocks, shape.kv_heads, BLOCK, shape.head_dim)
        self.caches = [
            [torch.empty(paged, **options).normal_() for _ in range(2)] for _ in range(self.copies)
        ]
        self.tables = torch.zeros(shape.batch, self.longest // BLOCK, dtype=torch.int32, device=device)
        order = torch.randperm(shape.batch * blocks, device=device).int()
        self.tables[:, :blocks] = order.view(shape.batch, blocks)
        self.lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
        if shape.ragged:  # the same sum
            spread = torch.linspace(1 - shape.context, shape.context - 1, shape.batch).round().int()
            self.lengths += spread[torch.randperm(shape.batch)].to(device)
        self.q = torch.empty(shape.batch, shape.heads, shape.head_dim, **options).normal_()
        self.arrivals = torch.zeros(shape.batch * shape.heads, dtype=torch.int32, device=device)

    def ours(self, copy: int, tiles: dict[str, int] | None = None) -> torch.Tensor:
        """[batch, heads, head_dim] of one layer."""
        sequences = Sequences(self.tables, self.lengths, self.longest)
        where = (PagedCache(*self.caches[copy]), sequences, Scoring(self.shape.head_dim**-0.5))
        return paged_attention(self.q, *where, tiles, arrivals=self.arrivals)

    def pytorch(self, copy: int) -> torch.Tensor:
        """The same work over contiguous keys: the cache's memory seen as [batch, kv_heads, context, D]."""
        shape = self.shape
        size = (shape.batch, shape.kv_heads, shape.context, shape.head_dim)
        k, v = (cache.flatten()[: math.prod(size)].view(size) for cache in self.caches[copy])
        shared = shape.heads != shape.kv_heads
        return F.scaled_dot_product_attention(self.q[:, :, None], k, v, enable_gqa=shared)


def figures(layers: Layers, call: Any, repeats: int = 15) -> dict[str, float]:
    """Median and 90th percentile µs of one call, GB/s of cache, share of the read ceiling in percent."""
    calls = [lambda copy=copy: call(copy % layers.copies) for copy in range(max(layers.copies, 6))]
    times = [total / len(calls) for total in graph_us(calls, repeats)]
    us = statistics.median(times)
    gb_s = layers.shape.cache_bytes / us * 1e-3
    return {
        "us": round(us, 2),
        "p90_us": round(times[int(0.9 * len(times))], 2),
        "gb_s": round(gb_s),
        "percent_of_read": round(100 * gb_s / READ_GB_S, 1),
    }


def attention_row(shape: Shape, sweep: bool = False) -> dict[str, Any]:
    """One shape: our figures, PyTorch's (of equal lengths), and with ``sweep`` every candidate's µs."""
    layers = Layers(shape)
    row: dict[str, Any] = {**shape.__dict__, "ours": figures(layers, layers.ours)}
    if not shape.ragged:
        row["pytorch_contiguous"] = figures(layers, layers.pytorch)
    if sweep:
        group = shape.heads // shape.kv_heads
        tried = candidate_tiles(shape.kv_heads, group, shape.head_dim, 2, layers.q.device, shape.batch)
        row["candidates_us"] = {
            compact(tiles): figures(layers, lambda copy, tiles=tiles: layers.ours(copy, tiles), 5)["us"]
            for tiles in tried
        }
    return row


def main() -> None:
    """Time every shape and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time the candidate tiles too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read_ceiling_gb_s": READ_GB_S,
        "rows": [],
    }
    for shape in SHAPES:
        results["rows"].append(attention_row(shape, arguments.sweep))
        print(results["rows"][-1], flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
