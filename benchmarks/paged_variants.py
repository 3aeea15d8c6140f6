"""Which decode attention to keep: every variant checked against float64, then timed beside today's and SDPA.

Owns the variants, their checks, and the recommendation. ``paged_attention.py --variants`` runs it. A
variant's ``fixed`` tiles decide the bits of a result, so a model has one choice of them for every batch and
context; ``free`` ones (OVERLAP, RUN) do not, so each shape takes its best.

    results = variant_results(seconds=80, dry=False)
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decode_stack import CONTEXT, LAYERS, Stack
from kernels_decode import compact, graph_us
from paged_attention import BLOCK, LONGEST, SHAPES, Layers, Shape, figures

from ingot.kernels.paged_attention import paged_attention_triton
from ingot.kernels.paged_stream import paged_stream_triton

Tiles = dict[str, int]
Op = Callable[..., torch.Tensor]
OPS: dict[str, Op] = {"now": paged_attention_triton, "stream": paged_stream_triton}
FREE = ("OVERLAP", "RUN")
LENGTHS, DRY_LENGTHS, DRY_LONGEST = (640, 1, 0, 64, 300, 65, 1500), (200, 0, 70), 256
RTOL, ATOL = 2e-3, 1e-3
KEYS_FIRST = {"AXIS": 2, "num_warps": 4}
WIDE = {"BLOCK_N": 64, "num_warps": 2}
NOW_MHA: list[Tiles] = [
    {},
    {**WIDE, "MAX_SPLITS": 8},
    {"BLOCK_N": 32},
    {"BLOCK_N": 32, "MIN_SPLIT": 128, "MAX_SPLITS": 4},
    {"MAX_SPLITS": 32},
    {**WIDE, "MAX_SPLITS": 32},
    {**WIDE, "MIN_SPLIT": 128, "MAX_SPLITS": 32},
]
NOW_GQA: list[Tiles] = [
    {},
    {"MIN_SPLIT": 256, "MAX_SPLITS": 16, "num_stages": 3},
    {"MIN_SPLIT": 256, "MAX_SPLITS": 16},
    {"MIN_SPLIT": 512, "MAX_SPLITS": 16},
]
STREAM: list[Tiles] = [
    {},
    {"BLOCK_N": 32, "num_stages": 4},
    KEYS_FIRST,
    {"BLOCK_N": 32},
    {"MERGE": 1},
    {"MIN_SPLIT": 256},
    {"num_stages": 4},
    {"num_warps": 4},
    {**KEYS_FIRST, "num_stages": 4},
    {**KEYS_FIRST, "MERGE": 1},
    {"BLOCK_N": 32, "num_stages": 4, "MIN_SPLIT": 256},
    {"BLOCK_N": 32, "MERGE": 1},
    {"BLOCK_N": 16, "num_warps": 1, "num_stages": 5},
]
MORE_SHAPES = [
    *(Shape(32, 8, 128, batch, 640) for batch in (1, 32, 64, 128)),
    *(Shape(32, 32, 128, batch, 640) for batch in (2, 4, 16, 32, 64, 128)),
    *(Shape(32, 8, 128, 1, context) for context in (2048, 8192, 32768)),
    *(Shape(32, 32, 128, 1, context) for context in (2048, 8192)),
    Shape(32, 8, 128, 8, 8192),
    Shape(32, 32, 128, 8, 2048),
    Shape(32, 8, 128, 64, 640, ragged=True),
    Shape(32, 32, 128, 64, 640, ragged=True),
]
TINY_SHAPES = [Shape(2, 2, 16, 1, 70), Shape(4, 1, 16, 2, 130), Shape(4, 1, 16, 2, 70, ragged=True)]
STEP_ROWS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Variant:
    """A kernel and the tiles that decide its bits."""

    op: str
    fixed: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """On one short line."""
        return f"{self.op} {compact(dict(self.fixed))}".strip()

    def tiles(self, free: Tiles) -> Tiles:
        """All tiles."""
        return {**dict(self.fixed), **free}


@dataclass(frozen=True)
class Family:
    """Shapes of one model: they share their ``fixed`` tiles."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """As a plan's keys say it."""
        return f"q{self.heads}_kv{self.kv_heads}_d{self.head_dim}"

    def variants(self, dry: bool) -> list[Variant]:
        """Today's default first; the head sizes that matter less have fewer."""
        now = NOW_MHA if self.heads == self.kv_heads else NOW_GQA
        stream = STREAM if self.head_dim == 128 or dry else STREAM[:4]
        chosen = [("now", tiles) for tiles in now] + [("stream", tiles) for tiles in stream]
        return [Variant(op, tuple(tiles.items())) for op, tiles in chosen]


def family_of(shape: Shape) -> Family:
    return Family(shape.heads, shape.kv_heads, shape.head_dim)


def overlaps_of(variant: Variant, family: Family, dry: bool) -> tuple[int, ...]:
    """OVERLAPs to try; the interpreter knows none."""
    if dry:
        return (1,)
    return (2, 4) if variant.op == "stream" or family.heads == family.kv_heads else (2,)


class Checked:
    """One family's requests in a poisoned cache, and their attention in float64."""

    def __init__(self, family: Family, device: str, lengths: Sequence[int]) -> None:
        torch.manual_seed(1)
        options: dict[str, Any] = {"dtype": torch.float16, "device": device}
        needed = [-(-length // BLOCK) for length in lengths]
        shape = (sum(needed) + 1, family.kv_heads, BLOCK, family.head_dim)
        self.caches = [torch.full(shape, math.nan, **options) for _ in range(2)]
        self.tables = torch.zeros(len(lengths), 64, dtype=torch.int32, device=device)  # block 0 is all NaN
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.q = torch.randn(len(lengths), family.heads, family.head_dim, **options)
        self.scale, self.bound = family.head_dim**-0.5, DRY_LONGEST if device == "cpu" else LONGEST
        self.expected = torch.zeros(self.q.shape, dtype=torch.float64, device=device)
        order, taken = torch.randperm(sum(needed)) + 1, 0
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            blocks, taken = order[taken : taken + count], taken + count
            self.tables[row, :count] = blocks.int().to(device)
            if length:
                self.expected[row] = self._filled(row, length, blocks.to(device))

    def _filled(self, row: int, length: int, blocks: torch.Tensor) -> torch.Tensor:
        """Write a request's keys and values; its attention, [heads, head_dim] float64."""
        kv_heads, head_dim = self.caches[0].shape[1], self.q.shape[2]
        dense = []
        for cache in self.caches:
            tokens = torch.randn(kv_heads, length, head_dim, device=cache.device).half()
            slots = torch.arange(length, device=cache.device)
            cache[blocks[slots // BLOCK], :, slots % BLOCK] = tokens.transpose(0, 1)
            dense.append(tokens.double().repeat_interleave(self.q.shape[1] // kv_heads, dim=0))
        scores = torch.einsum("hd,hnd->hn", self.q[row].double(), dense[0]) * self.scale
        return torch.einsum("hn,hnd->hd", scores.softmax(dim=1), dense[1])

    def run(self, variant: Variant, free: Tiles, rows: slice = slice(None), looser: int = 1) -> torch.Tensor:
        """A variant's result in poisoned memory."""
        arrivals = torch.zeros(len(self.q) * self.q.shape[1], dtype=torch.int32, device=self.q.device)
        out = torch.full_like(self.q[rows], math.nan)
        where = (*self.caches, self.tables[rows], self.lengths[rows], self.scale, self.bound * looser)
        OPS[variant.op](self.q[rows], *where, tiles=variant.tiles(free), out=out, arrivals=arrivals)
        if arrivals.any():
            raise ValueError("the counts are not left at zero")
        return out

    def fault(self, variant: Variant, overlaps: Sequence[int]) -> str:
        """What is wrong with a variant; empty: near float64, and the same bits in any company."""
        runs: list[Tiles] = [{"RUN": run} for run in (4, 1, 8)] if variant.op == "stream" else [{}]
        try:
            first = self.run(variant, {"OVERLAP": overlaps[0], **runs[0]})
            error = (first.double() - self.expected).abs()
            if not bool((error <= ATOL + RTOL * self.expected.abs()).all()):
                return f"error {error.max().item():.2e}"
            for overlap in overlaps:
                for run in runs:
                    if not torch.equal(self.run(variant, {"OVERLAP": overlap, **run}), first):
                        return f"other bits with OVERLAP {overlap} {run}"
            for row in (0, len(self.q) - 1):
                one = slice(row, row + 1)
                alone = self.run(variant, {"OVERLAP": overlaps[-1], **runs[-1]}, one, 2)
                if not torch.equal(alone, first[one]):
                    return "other bits alone"
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"[:300]
        return ""


def faults_of(
    families: Sequence[Family], dry: bool, share: tuple[int, int] = (0, 1)
) -> dict[Family, dict[Variant, str]]:
    """Compile and check every variant, or a ``share`` of them; memory that nobody wrote reads as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    found: dict[Family, dict[Variant, str]] = {family: {} for family in families}
    jobs = [(family, variant) for family in families for variant in family.variants(dry)]
    checked: dict[Family, Checked] = {}
    for family, variant in jobs[share[0] :: share[1]]:
        if family not in checked:
            checked[family] = Checked(family, *(("cpu", DRY_LENGTHS) if dry else ("cuda", LENGTHS)))
        found[family][variant] = checked[family].fault(variant, overlaps_of(variant, family, dry))
    torch.use_deterministic_algorithms(False)
    return found


def compile_together(processes: int = 12) -> None:
    """Fill Triton's cache from several processes, each with a share of the variants."""
    script = str(Path(__file__).with_name("paged_attention.py"))
    started = [
        subprocess.Popen([sys.executable, script, "--variants", "--compile", f"{index}/{processes}"])
        for index in range(processes)
    ]
    for process in started:
        process.wait()


def shapes_of(dry: bool) -> list[Shape]:
    """What is timed, the most telling first."""
    return TINY_SHAPES if dry else [*SHAPES, *(shape for shape in MORE_SHAPES if shape not in SHAPES)]


def compile_share(share: str) -> None:
    """One process's share, ``index/processes``."""
    index, count = (int(part) for part in share.split("/"))
    faults_of(list(dict.fromkeys(map(family_of, shapes_of(dry=False)))), False, (index, count))


def timed(layers: Layers, call: Callable[[int], Any], repeats: int, dry: bool) -> dict[str, float]:
    """Figures of one call; a dry run has the host's clock and one call."""
    if not dry:
        return figures(layers, call, repeats)
    begun = time.perf_counter()
    call(0)
    return {"us": round((time.perf_counter() - begun) * 1e6, 2)}


def frees_of(variant: Variant, shape: Shape, overlap: int) -> Iterator[Tiles]:
    """Runs that leave enough programs and have enough spans; none for today's kernels."""
    if variant.op == "now":
        yield {"OVERLAP": overlap}
        return
    spans = -(-shape.context // max(dict(variant.fixed).get("MIN_SPLIT", 128), -(-shape.context // 64)))
    for run in (1, 2, 4, 8):
        if run == 1 or (run < 2 * spans and shape.batch * shape.kv_heads * spans >= 128 * run):
            yield {"OVERLAP": overlap, "RUN": run}


def best_free(layers: Layers, variant: Variant, overlaps: Sequence[int], dry: bool) -> dict[str, Any]:
    """The quickest of the choices that do not change bits: the RUNs first, then OVERLAP at the best."""

    def entry(free: Tiles) -> dict[str, Any]:
        found = timed(layers, lambda copy: attend(layers, copy, variant, free), 5, dry)
        return {"name": variant.name, **found, "free": free}

    runs = [entry(free) for free in frees_of(variant, layers.shape, overlaps[0])]
    best = min(runs, key=lambda one: one["us"])
    others = [entry({**best["free"], "OVERLAP": overlap}) for overlap in overlaps[1:]]
    return min([best, *others], key=lambda one: one["us"])


def attend(layers: Layers, copy: int, variant: Variant, free: Tiles) -> torch.Tensor:
    """One layer's attention by a variant."""
    where = (layers.tables, layers.lengths, layers.shape.head_dim**-0.5, layers.longest)
    tiles = variant.tiles(free)
    return OPS[variant.op](layers.q, *layers.caches[copy], *where, tiles=tiles, arrivals=layers.arrivals)


def shape_row(shape: Shape, variants: Sequence[Variant], device: str, dry: bool) -> dict[str, Any]:
    """Every variant's best µs at a shape; the best two, today's and SDPA again with more repeats."""
    layers, family = Layers(shape, device, DRY_LONGEST if dry else LONGEST), family_of(shape)
    tried = [(best_free(layers, v, overlaps_of(v, family, dry), dry), v) for v in variants]
    tried.sort(key=lambda pair: pair[0]["us"])
    row: dict[str, Any] = {**shape.__dict__, "variants": [entry for entry, _ in tried], "again": {}}
    for entry, variant in tried[:2]:
        row["again"][f"{variant.name} {compact(entry['free'])}"] = timed(
            layers, lambda copy, v=variant, f=entry["free"]: attend(layers, copy, v, f), 15, dry
        )
    row["default"] = timed(layers, lambda copy: attend(layers, copy, Variant("now"), {}), 15, dry)
    row["default_us"] = row["default"]["us"]
    if not shape.ragged:
        row["sdpa_contiguous"] = timed(layers, layers.pytorch, 15, dry)
    return row


def recommended(family: Family, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The three fixed choices nearest to the best of every shape, by the geometric mean of time / best."""
    scores: list[dict[str, Any]] = []
    for name in [entry["name"] for entry in rows[0]["variants"]]:
        ratios, frees = [], {}
        for row in rows:
            entry = next(e for e in row["variants"] if e["name"] == name)
            ratios.append(entry["us"] / row["variants"][0]["us"])
            ragged = " ragged" if row["ragged"] else ""
            frees[f"{row['batch']}x{row['context']}{ragged}"] = {
                "us": entry["us"],
                "default_us": row["default_us"],
                "sdpa_us": row.get("sdpa_contiguous", {}).get("us"),
                **entry["free"],
            }
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        scores.append(
            {"tiles": name, "over_best": round(mean, 3), "worst": round(max(ratios), 3), "shapes": frees}
        )
    return sorted(scores, key=lambda score: score["over_best"])[:3]


class AttentionStack(Stack):
    """The 7B decode step with a variant's attention."""

    variant = Variant("now")

    def attend(self, q: torch.Tensor, layer: int, tiles: Tiles | None) -> torch.Tensor:
        """[rows, heads, head_dim] → the same; ``tiles``: the free ones."""
        rows = len(q)
        where = (self.tables[:rows], self.lengths[:rows], q.shape[2] ** -0.5, 4096)
        chosen = self.variant.tiles(tiles or {})
        return OPS[self.variant.op](q, *self.caches[layer], *where, tiles=chosen, arrivals=self.arrivals)


def step_rows(
    stack: AttentionStack, variants: Sequence[Variant], overlaps: Sequence[int]
) -> list[dict[str, Any]]:
    """Milliseconds of a 7B step (MHA, 640 tokens) by rows, variant and OVERLAP; other ops as by default."""
    rows = []
    for count in STEP_ROWS:
        row: dict[str, Any] = {"rows": count, "context": CONTEXT}
        for variant in variants:
            stack.variant = variant
            for overlap in overlaps:
                plan: Any = {"attention": {"OVERLAP": overlap}}
                times = graph_us([lambda n=count, p=plan: stack.fused_step(n, p)], 7)
                row[f"{variant.name} OVERLAP={overlap}"] = round(statistics.median(times) / 1e3, 3)
        rows.append(row)
        print("step", row, flush=True)
    return rows


def variant_results(seconds: float, dry: bool) -> dict[str, Any]:
    """Check, time and recommend; shapes that failed or ``seconds`` do not reach are in ``not_reached``."""
    begun, device = time.monotonic(), "cpu" if dry else "cuda"
    shapes = shapes_of(dry)
    families = list(dict.fromkeys(map(family_of, shapes)))
    if not dry:
        compile_together()
        print(f"compiled in {time.monotonic() - begun:.1f} s", flush=True)
    faults = faults_of(families, dry)
    good = {family: [v for v, fault in faults[family].items() if not fault] for family in families}
    wrong = {f"{f.name} {v.name}": fault for f in families for v, fault in faults[f].items() if fault}
    print(f"checked {sum(map(len, faults.values()))} in {time.monotonic() - begun:.1f} s, wrong: {wrong}")
    wide = Variant("now", tuple(NOW_MHA[1].items()))
    mha = [v for v in (Variant("now"), wide, Variant("stream")) if v in good.get(Family(32, 32, 128), [])]
    steps = [] if dry else step_rows(AttentionStack(LAYERS, STEP_ROWS[-1]), mha, (2, 4))
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    for shape in shapes:
        if time.monotonic() - begun > seconds:
            missed.append(str(shape))
            continue
        try:
            rows.append(shape_row(shape, good[family_of(shape)], device, dry))
        except Exception as problem:
            missed.append(f"{shape}: {type(problem).__name__}: {problem}"[:300])
            continue
        best = rows[-1]["variants"][0]
        sdpa = rows[-1].get("sdpa_contiguous", {}).get("us")
        print(f"{shape} default {rows[-1]['default_us']} SDPA {sdpa} best {best}", flush=True)
    advice: dict[str, Any] = {}
    for family in families:
        mine = [row for row in rows if (row["heads"], row["kv_heads"], row["head_dim"])
                == (family.heads, family.kv_heads, family.head_dim)]  # fmt: skip
        if mine:
            advice[family.name] = recommended(family, mine)
            for score in advice[family.name]:
                print(f"{family.name}: {score['tiles']} {score['over_best']}x of the best", flush=True)
    return {"wrong": wrong, "not_reached": missed, "steps": steps, "rows": rows, "recommended": advice,
            "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip
