"""Attention of 64 tokens of a long prompt, alone or beside 63 decodes, by how many parts its keys are cut in.

What a captured step launches for one layer: decode attention and prompt attention, with the step's own list
of tiles. 0 parts is every tile whole, as before tiles were cut; the others are most parts of all tiles.
Beside them are decode attention by itself, and both launches of a step that turns out to have no chunk. Each
figure is a CUDA graph over the caches of several layers, more than the L2 cache holds, in µs a layer. The
floor is the chunk's keys and values at the read ceiling.

    python benchmarks/chunks.py --json docs/results/chunks.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import READ_GB_S, graph_us

from ingot import SamplingParams
from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.kernels.cache.cache_scales import NARROW_CACHES
from ingot.kernels.tiles.prefill_tiles import most_parts
from ingot.layers.attention import Attention
from ingot.layers.build_context import BuildContext
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest, layout_of
from ingot.runtime.step.step_buffer import StepBuffer

BLOCK, CHUNK, DECODES, DECODE_KEYS, COPIES = 64, 64, 63, 600, 6
DTYPE = torch.float16


@dataclass(frozen=True)
class Shape:
    """Heads of 128 channels, the cache's dtype (``model``: fp16), and the keys that the chunk's last token
    sees.
    """

    heads: int
    kv_heads: int
    kv_dtype: str
    keys: int

    @property
    def floor_us(self) -> float:
        """Of the chunk's keys and values."""
        per_head = 2 * 128 if self.kv_dtype == "model" else 128 + 4
        return round(2 * self.keys * self.kv_heads * per_head / READ_GB_S * 1e-3, 1)


SHAPES = [
    Shape(*kind, keys)
    for kind in ((32, 32, "model"), (32, 8, "model"), (32, 32, "int8"))
    for keys in (4096, 16384, 32768)
]


def step_of(decodes: int, chunks: list[int]) -> tuple[ScheduledBatch, int]:
    """Decodes in front of chunks that see so many keys, and how many blocks they own."""
    found, blocks = [], 0
    for row, keys in enumerate([DECODE_KEYS] * decodes + chunks):
        count, own = (1 if row < decodes else CHUNK), -(-keys // BLOCK)
        ids = [0] * keys
        request = Request(str(row), ids, SamplingParams(), 99, blocks=list(range(blocks, blocks + own)))
        found.append(ScheduledRequest(request, keys - count, count, samples=False))
        blocks += own
    return ScheduledBatch(found), blocks


def batch_of(shape: Shape, decodes: int, chunks: list[int], parts: int, rows: int) -> ForwardBatch:
    """The step as a captured one, in the buckets of one with a chunk."""
    step, _ = step_of(decodes, chunks)
    sizes = (128, 64) if decodes else (64, 1)
    buffer = StepBuffer(
        *(*sizes, -(-shape.keys // BLOCK), sizes[1], torch.device("cuda"), shape.kv_heads),
        tile_rows=rows,
        tile_parts=parts,
    )
    buffer.fill(layout_of(step.requests, BLOCK))
    buffer.upload()
    torch.cuda.synchronize()
    counts = torch.zeros(4096, dtype=torch.int32, device="cuda")  # for more parts than by default
    return replace(buffer.padded_batch(sizes[0], shape.keys), arrivals=counts)


def caches_of(shape: Shape) -> list[LayerCache]:
    """Random keys and values of several layers."""
    torch.manual_seed(0)
    blocks = step_of(DECODES, [shape.keys])[1]
    dtype = NARROW_CACHES.get(shape.kv_dtype, DTYPE)
    sizes = (blocks, shape.kv_heads, BLOCK, 128, dtype, torch.device("cuda"))
    found = [LayerCache.zeros(*sizes) for _ in range(COPIES)]
    for cache in found:
        for tensor in (cache.keys, cache.values):
            tensor.random_(-127, 128) if dtype == torch.int8 else tensor.normal_()
        for scales in () if cache.scales is None else cache.scales.tensors:
            scales.fill_(1 / 64)
    return found


def attention_of(shape: Shape) -> Attention:
    """A layer's attention; its products are not run."""
    config = DecoderConfig(
        "llama", 64, 64, 64, 1, num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=128,
        max_positions=shape.keys,
    )  # fmt: skip
    with torch.device("cuda"):
        return Attention(config, BuildContext(QuantConfig(), KernelPlan(), DTYPE), 0)


def row_of(shape: Shape) -> dict[str, Any]:
    """Medians of one shape by parts, of the chunk alone and beside decodes."""
    attention, caches = attention_of(shape), caches_of(shape)
    rows = attention.tile_rows(CHUNK, caches[0], DTYPE)
    default = most_parts(shape.heads, 128, rows)
    row: dict[str, Any] = {**shape.__dict__, "floor_us": shape.floor_us, "default_parts": default}
    empty = batch_of(shape, DECODES, [], default, rows)
    row["decodes_us"] = layer_us(attention, replace(empty, split=None, max_query_len=1), caches)
    row["no_chunk_us"] = layer_us(attention, empty, caches)
    for name, decodes in (("alone_us", 0), ("beside_decodes_us", DECODES)):
        row[name] = {
            str(parts): layer_us(attention, batch_of(shape, decodes, [shape.keys], parts, rows), caches)
            for parts in (0, default // 2, default, 2 * default)
        }
    return row


def layer_us(attention: Attention, batch: ForwardBatch, caches: list[LayerCache]) -> float:
    """The median of one layer's attention."""
    query = torch.randn(len(batch.positions), attention.config.num_heads, 128, dtype=DTYPE, device="cuda")
    calls: list[Callable[[], Any]] = [
        lambda cache=cache: attention.attend(query, batch, cache) for cache in caches
    ]
    return round(statistics.median(graph_us(calls, 15)) / COPIES, 1)


@torch.inference_mode()
def main() -> None:
    """Time every shape and print one JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        results["rows"].append(row_of(shape))
        print(results["rows"][-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
