"""Attention over a KV cache in 8 bits beside one in fp16, at shapes of 7B models: µs, GB/s.

Decode attention at several batches, with and without groups of heads; the write of a step's keys and values;
prefill attention. Each runs as one CUDA graph over the caches of as many layers as 2 GB hold, so that nothing
comes from the L2 cache. The ratio is int8's time over fp16's; its bytes are 0.516 times as many. ``--sweep``
times every candidate tile of decode attention as well. About 60 s on an H200.

    python benchmarks/int8_cache.py --sweep --json docs/results/int8_cache.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import READ_GB_S, compact, graph_us

from ingot.kernels.attention.attention_arguments import Scoring, Sequences
from ingot.kernels.attention.paged_attention import candidate_tiles, paged_attention
from ingot.kernels.attention.prefill_attention import prefill_attention
from ingot.kernels.cache.qkv_placement import Placement, QkvHeads, TokenPlaces
from ingot.kernels.cache.rope_kv_write import rope_kv_write
from ingot.layers.forward_batch import LayerCache

BLOCK, LONGEST, BUDGET, HEAD_DIM = 64, 4096, 2.2e9, 128
DTYPES = {"fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True)
class Shape:
    """Requests of one length; all heads of one layer."""

    heads: int
    kv_heads: int
    batch: int
    context: int

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Keys and values of one layer, scales included."""
        head = HEAD_DIM * dtype.itemsize + (4 if dtype == torch.int8 else 0)
        return 2 * self.batch * self.context * self.kv_heads * head


DECODES = [
    Shape(heads, kv_heads, batch, context)
    for heads, kv_heads in ((32, 32), (32, 8))
    for batch, context in ((1, 640), (1, 4096), (8, 640), (32, 640), (64, 576), (128, 600), (256, 600))
]
PREFILLS = [Shape(32, 32, 1, 2048), Shape(32, 32, 8, 256), Shape(32, 8, 1, 2048)]


class Layers:
    """Random paged caches of several layers in one dtype."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.shape, self.dtype, blocks = shape, dtype, -(-shape.context // BLOCK)
        copies = max(min(int(BUDGET // shape.cache_bytes(dtype)), 32), 2)
        self.caches = [self._filled(shape.batch * blocks) for _ in range(copies)]
        self.tables = torch.zeros(shape.batch, LONGEST // BLOCK, dtype=torch.int32, device="cuda")
        order = torch.randperm(shape.batch * blocks, device="cuda").int()
        self.tables[:, :blocks] = order.view(shape.batch, blocks)
        self.lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda")
        self.arrivals = torch.zeros(shape.batch * shape.heads, dtype=torch.int32, device="cuda")

    def _filled(self, blocks: int) -> LayerCache:
        device = torch.device("cuda")
        cache = LayerCache.zeros(blocks, self.shape.kv_heads, BLOCK, HEAD_DIM, self.dtype, device)
        for tensor in cache.tensors:
            if tensor.dtype == torch.int8:
                tensor.copy_(torch.randint(-127, 128, tensor.shape, dtype=torch.int8, device=device))
            else:
                tensor.normal_() if cache.scales is None else tensor.uniform_(0.01, 0.03)
        return cache

    def queries(self, rows: int) -> torch.Tensor:
        """[rows, heads, head_dim]"""
        return torch.randn(rows, self.shape.heads, HEAD_DIM, dtype=torch.float16, device="cuda")

    def decode(self, tiles: dict[str, int] | None = None) -> Callable[[LayerCache], Any]:
        """One query a request."""
        q = self.queries(self.shape.batch)
        where = (Sequences(self.tables, self.lengths, LONGEST), Scoring(HEAD_DIM**-0.5), tiles)
        return lambda cache: paged_attention(q, cache, *where, arrivals=self.arrivals)

    def prefill(self) -> Callable[[LayerCache], Any]:
        """Whole prompts."""
        shape = self.shape
        q = self.queries(shape.batch * shape.context)
        starts = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * shape.context
        sequences = Sequences(self.tables, self.lengths, LONGEST, starts, shape.context)
        return lambda cache: prefill_attention(q, cache, sequences, Scoring(HEAD_DIM**-0.5))

    def write(self) -> Callable[[LayerCache], Any]:
        """The newest token of each request: rotary embedding and the write."""
        shape = self.shape
        width = (shape.heads + 2 * shape.kv_heads) * HEAD_DIM
        qkv = torch.randn(shape.batch, width, dtype=torch.float16, device="cuda")
        table = torch.randn(LONGEST, HEAD_DIM, device="cuda")
        last = shape.context - 1
        slots = self.tables[:, last // BLOCK].long() * BLOCK + last % BLOCK
        rows = torch.full((shape.batch,), last, device="cuda")
        tokens, heads = TokenPlaces(rows, rows, slots), QkvHeads(shape.heads, shape.kv_heads, HEAD_DIM)
        return lambda cache: rope_kv_write(qkv, Placement(table, tokens, cache, heads))

    def us(self, call: Callable[[LayerCache], Any], repeats: int = 15) -> float:
        """Median µs of one call."""
        count = max(len(self.caches), 6)
        calls = [lambda i=i: call(self.caches[i % len(self.caches)]) for i in range(count)]
        return round(statistics.median(graph_us(calls, repeats)) / count, 2)


def row(name: str, shape: Shape, sweep: bool) -> dict[str, Any]:
    """Both dtypes of one op at one shape."""
    found: dict[str, Any] = {"op": name, **shape.__dict__}
    for label, dtype in DTYPES.items():
        layers = Layers(shape, dtype)
        us = layers.us(getattr(layers, name)())
        found[label] = {"us": us}
        if name == "decode":
            gb_s = shape.cache_bytes(dtype) / us * 1e-3
            found[label] |= {"gb_s": round(gb_s), "percent_of_read": round(100 * gb_s / READ_GB_S, 1)}
            if sweep and dtype == torch.int8:
                group, device = shape.heads // shape.kv_heads, layers.tables.device
                tried = candidate_tiles(shape.kv_heads, group, HEAD_DIM, 1, device, shape.batch)
                found["candidates_us"] = {compact(t): layers.us(layers.decode(t), 5) for t in tried}
    found["ratio"] = round(found["int8"]["us"] / found["fp16"]["us"], 3)
    return found


def main() -> None:
    """Time every op and shape and print one JSON."""
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
    asked = [("decode", shape) for shape in DECODES] + [("prefill", shape) for shape in PREFILLS]
    asked += [("write", Shape(32, 32, batch, 600)) for batch in (1, 64, 256)]
    for name, shape in asked:
        results["rows"].append(row(name, shape, arguments.sweep))
        print(results["rows"][-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
