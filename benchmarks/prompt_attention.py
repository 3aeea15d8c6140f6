"""Prompt attention by its kernels, tiles of 64 queries and Hopper's warp groups; caches of 16 and 8 bits.

Each figure is a CUDA graph over two sets of queries and caches; a rate counts the multiplications of what
causal queries see.

    python benchmarks/prompt_attention.py --json docs/results/prompt_attention.json
    python benchmarks/prompt_attention.py --few
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
from timing import graph_us

from ingot.kernels.attention.attention_arguments import AttentionOutput, Scoring, Sequences
from ingot.kernels.attention.prefill_attention import prefill_attention
from ingot.kernels.cache.cache_scales import NARROW_CACHES, CacheScales, quantize_heads
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.tiles.prefill_tiles import HOPPER_TILES, default_tiles

HEAD_DIM, BLOCK, SETS = 128, 64, 2
CASES = {  # keys of each request, new tokens of each
    "64x512": ([512] * 64, [512] * 64),
    "32x1024": ([1024] * 32, [1024] * 32),
    "2048": ([2048], [2048]),
    "16384": ([16384], [16384]),
    "8x2048": ([2048] * 8, [2048] * 8),
    "7000_and_40x300": ([7000, *[300] * 40], [7000, *[300] * 40]),
    "4096": ([4096], [4096]),
    "2048_on_16384": ([16384], [2048]),
}


@dataclass(frozen=True)
class Setting:
    """Heads, the dtype of queries, and the cache's: ``model`` or a narrow one's name."""

    heads: int
    kv_heads: int
    dtype: torch.dtype
    cache: str = "model"

    @property
    def name(self) -> str:
        """Short."""
        kind = "bf16" if self.dtype == torch.bfloat16 else "fp16"
        return f"{self.heads}_{self.kv_heads}_{kind}_{self.cache}"


def made(setting: Setting, keys: list[int]) -> tuple[PagedCache, torch.Tensor]:
    """A cache of random keys and values in shuffled blocks, and its block tables."""
    counts = [-(-count // BLOCK) for count in keys]
    order = torch.randperm(sum(counts), device="cuda").int()
    tables = torch.zeros(len(keys), max(counts), dtype=torch.int32, device="cuda")
    for row, blocks in zip(tables, order.split(counts), strict=True):
        row[: len(blocks)] = blocks
    shape = (sum(counts), setting.kv_heads, BLOCK, HEAD_DIM)
    wide = [torch.randn(shape, dtype=setting.dtype, device="cuda") for _ in range(2)]
    if setting.cache == "model":
        return PagedCache(*wide), tables
    (keys_8, key_scales), (values_8, value_scales) = (
        quantize_heads(tensor, NARROW_CACHES[setting.cache]) for tensor in wide
    )
    return PagedCache(keys_8, values_8, CacheScales(key_scales, value_scales)), tables


def measured(setting: Setting, keys: list[int], queries: list[int]) -> dict[str, float]:
    """µs and TFLOP/s by kernel."""
    starts = torch.tensor([0, *queries], device="cuda").cumsum(0).int()
    lens = torch.tensor(keys, dtype=torch.int32, device="cuda")
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    sets = []
    for _ in range(SETS):
        cache, tables = made(setting, keys)
        q = torch.randn(sum(queries), setting.heads, HEAD_DIM, dtype=setting.dtype, device="cuda")
        sets.append((q, cache, Sequences(tables, lens, max(keys), starts, max(queries)), torch.empty_like(q)))
    seen = sum(count * (own - count / 2) for own, count in zip(keys, queries, strict=True))
    flops, found = 4 * setting.heads * HEAD_DIM * seen, {}
    plain = default_tiles(max(queries), HEAD_DIM, 2, setting.cache != "model")
    for name, tiles in (("tiles", plain), ("groups", HOPPER_TILES)):

        def launch(tiles: dict[str, int] = tiles) -> None:
            for q, cache, sequences, out in sets:
                scoring = Scoring(HEAD_DIM**-0.5)
                output = AttentionOutput(out)
                prefill_attention(q, cache, sequences, scoring, tiles, output, arrivals=counts)

        found[name] = statistics.median(graph_us([launch], 15)) / SETS
    rounded = {f"{name}_us": round(us, 1) for name, us in found.items()}
    return {**rounded, **{f"{name}_tflops": round(flops / us / 1e6) for name, us in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--few", action="store_true", help="one dtype of queries")
    options = parser.parse_args()
    brain, half = torch.bfloat16, torch.float16
    settings = [
        Setting(32, 8, brain),
        Setting(32, 32, brain),
        *(Setting(32, 8, brain, c) for c in NARROW_CACHES),
    ]
    settings += [] if options.few else [Setting(32, 8, half), Setting(32, 32, half)]
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "settings": {},
    }
    for setting in settings:
        rows = report["settings"].setdefault(setting.name, {})
        for case, (keys, queries) in CASES.items():
            rows[case] = measured(setting, keys, queries)
            print(setting.name, case, rows[case], flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
