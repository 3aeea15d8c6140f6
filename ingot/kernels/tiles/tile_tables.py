"""Default tiles of products by rows and shape, as measured on an H200 and an H100.

A table has a name and the names of its tiles, or "…" for those of the table before it. A line is for up to so
many rows, each of its choices for up to so many outputs (of partial sums: inputs). The first that fits is
taken.

    tiles = chosen("dense", rows=8, size=4096)      # {"BLOCK_N": 32, "BLOCK_K": 256, …}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

Tiles = dict[str, int]
NARROW, MOST_OUTPUTS = 2048, 16383  # outputs or inputs of a narrow model's products, heads left out


class Line(NamedTuple):
    """Tiles for up to so many rows and outputs, or inputs; 0: any."""

    rows: int
    size: int
    tiles: Tiles


def parsed(text: str) -> dict[str, list[Line]]:
    """Tables by name."""
    tables: dict[str, list[Line]] = {}
    names: list[str] = []
    for line in text.splitlines():
        before, colon, choices = line.partition("#")[0].rpartition(":")
        if colon:
            rows = int(before.replace("any", "0"))
        elif line and not line.startswith(" "):
            table, *words = choices.split()
            names, lines = names if words == ["…"] else words, tables.setdefault(table, [])
            continue
        for choice in filter(None, choices.strip().split(";")):
            most, *tiles = choice.split() if "≤" in choice else ("0", *choice.split())
            values = map(int, tiles)
            lines.append(Line(rows, int(most.strip("≤")), dict(zip(names, values, strict=True))))
    return tables


def chosen(
    table: str, rows: int, size: int, wanted: Callable[[Tiles], bool] | None = None, *, narrow: bool = False
) -> Tiles:
    """The first tiles of a table for so many rows and such a size, of those that are ``wanted``; ``narrow``:
    of the table for narrow models, as far as there are lines for so many rows.
    """
    lines = TABLES.get(f"{table}_narrow", []) if narrow else []
    return next(
        dict(line.tiles)
        for line in [*lines, *TABLES[table]]
        if rows <= (line.rows or rows)
        and size <= (line.size or size)
        and (wanted is None or wanted(line.tiles))
    )


def is_narrow(outputs: int, inputs: int) -> bool:
    """Whether a product has so few outputs or inputs that it takes the tables of narrow models."""
    return min(outputs, inputs) <= NARROW and outputs <= MOST_OUTPUTS


def listed(table: str, rows: int = 0, tables: Mapping[str, list[Line]] | None = None) -> list[Tiles]:
    """All tiles of a table for so many rows."""
    lines = (TABLES if tables is None else tables)[table]
    most = next(line.rows for line in lines if rows <= (line.rows or rows))
    return [dict(line.tiles) for line in lines if line.rows == most]


def each_once(found: list[Tiles]) -> list[Tiles]:
    """The choices without repetitions."""
    return [tiles for place, tiles in enumerate(found) if tiles not in found[:place]]


# Products of few rows were measured in steps of a 7B model. Up to 8 rows launches overlap enough that early
# weights are worth most; from 16 rows on x is worth pipelining, and equal shares.
# narrow: inside the steps of Whisper small and large-v3 (benchmarks/narrow_steps.py), with 64 rows and one.
# 6144, 28672 outputs and 14336 inputs: Llama-3.1-8B, on an H100 (benchmarks/decode_variants.py --shape);
# of 16 and 32 rows on an H200.
# int8_straight: a weight of 4 bits inside 8 is loaded straight into registers, as it is stored
# (benchmarks/int8_variants.py).
# …straight: FRAGMENTS 1: a warp loads a chunk at its step, 2: one ahead; one line for 1 to 8 rows.
# packed: with DIRECT x is in the operand's order (benchmarks/narrow_variants.py, packed_matmul.py).
# large_int8: the compiler waits for a tensor-core product with int32 sums where it is issued; only fp32 sums
# run on. Two programs of one warp group each wait at different times: so an H200 reaches 1380 to 1420 TOPS,
# with the second line 1200 to 1240. RATE is the expected speed in % of that.
TABLES = parsed("""
dense BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
  8: ≤6143 32 256 2 4 0 1; ≤8191 32 256 2 4 0 256; ≤16383 32 256 2 4 0 1; ≤24575 64 256 4 3 0 1;
     ≤32767 128 256 8 2 1 1; 64 256 4 3 0 1
 16: ≤16383 64 128 4 4 2 256; ≤28671 64 128 4 3 3 128; ≤32767 64 128 4 4 2 128; ≤65535 64 128 4 3 3 128;
     128 128 4 3 2 0
 32: ≤6143 64 128 4 4 2 128; ≤8191 32 128 2 6 2 0; ≤16383 64 128 4 4 2 128; ≤28671 64 128 4 3 3 0;
     ≤32767 64 128 4 4 2 128; ≤65535 64 128 4 3 3 0; 128 128 8 4 1 128
 64: ≤6143 128 64 8 5 1 0; ≤8191 64 64 4 8 1 0; ≤16383 128 64 8 5 1 0; ≤28671 64 64 4 4 3 0;
     ≤32767 128 64 8 4 2 0; ≤65535 64 64 4 4 3 0; 128 64 4 4 2 0

dense_parts BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH SPLITS
  8: ≤4095 64 256 4 3 0 1 4; ≤8192 64 256 4 3 2 1 4; ≤12287 128 128 4 3 0 2 8; 64 256 4 3 2 1 4
 16: ≤8192 64 128 4 4 2 0 4; 64 256 4 3 2 1 4
 32: ≤4095 64 128 4 3 2 128 4; ≤8192 64 128 4 4 2 128 2; 128 128 8 4 1 128 4
 64: ≤4095 128 64 8 5 1 128 4; ≤8192 64 128 4 4 1 128 2; ≤12287 128 64 8 5 1 128 4; 64 128 4 4 1 128 2

dense_narrow BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
  8: 32 256 2 4 0 1
 64: ≤1024 16 128 4 4 0 0; ≤4095 64 128 4 4 0 128; 64 128 4 4 0 0

dense_parts_narrow BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH SPLITS
  8: ≤8192 64 256 4 3 0 1 4; 128 128 4 3 0 2 8
 64: ≤1024 64 64 4 5 0 0 8; ≤1280 64 64 4 5 0 0 4; 64 64 4 5 0 0 8

float BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
any: 16 64 2 3 0 1

float_parts BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH SPLITS
any: 16 64 2 3 0 1 1

8_bits BLOCK_N num_warps num_stages PROGRAMS PREFETCH  # BLOCK_K is a chunk of the layout
  8: ≤16383 64 4 8 3 0; 64 2 6 4 0
 16: 64 4 6 3 0
 32: ≤16383 128 8 6 1 0; 128 4 4 2 0
 64: ≤16383 64 4 4 2 0; 128 8 4 2 0

8_bits_parts BLOCK_N num_warps num_stages PROGRAMS PREFETCH SPLITS
  8: ≤8192 128 8 4 2 0 8; 64 4 6 2 0 4
 16: 128 8 6 1 0 8
 32: 128 8 4 1 0 8
 64: ≤8192 64 4 4 2 0 4; 128 8 4 1 0 8

4_bits BLOCK_N num_warps num_stages PROGRAMS PREFETCH
  8: ≤16383 64 4 6 2 0; 64 4 6 3 0
 16: ≤16383 128 8 6 1 0; 32 2 4 6 0
 32: ≤16383 64 4 4 2 0; 128 8 4 2 0
 64: 128 8 4 1 0

4_bits_parts BLOCK_N num_warps num_stages PROGRAMS PREFETCH SPLITS
  8: ≤8192 64 4 6 0 1 8; 128 4 4 2 0 8
 16: 64 4 4 2 0 8
 32: ≤8192 128 8 4 1 0 8; 64 4 4 2 0 4
 64: 128 8 4 1 0 4

8_bits_straight BLOCK_N num_warps FRAGMENTS SPLITS
any: ≤6143 32 4 1 1; ≤8191 32 8 1 1; ≤16383 32 4 1 1; ≤28671 64 4 1 1; ≤65535 32 2 2 1; 32 2 1 1
8_bits_straight_parts …
any: 32 2 1 8
8_bits_straight_narrow …
any: ≤2048 16 4 1 1; 32 4 1 1
8_bits_straight_parts_narrow …
any: ≤2048 16 2 1 4; 16 4 1 4
4_bits_straight …
any: ≤8191 32 4 3 1; ≤16383 32 4 2 1; ≤24575 32 2 2 1; 64 2 2 1
4_bits_straight_parts …
any: ≤8192 32 2 3 4; ≤10239 32 2 3 7; 32 2 2 4

int8 BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
  8: ≤5999 32 256 2 6 0 1; 64 256 4 5 2 0
 16: ≤16383 64 256 4 5 2 0; 64 256 4 4 3 0
 32: ≤16383 64 256 4 4 2 0; 64 256 4 3 3 0
 64: ≤16383 64 128 4 6 2 0; 128 128 4 4 2 0

int8_parts BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH SPLITS
  8: ≤8192 64 256 4 4 0 1 8; 64 256 4 6 0 0 4
 16: ≤8192 64 256 4 4 0 1 8; 64 256 4 6 0 0 4
 32: ≤8192 64 256 4 4 0 0 8; 64 256 4 4 0 0 4
 64: 128 128 4 4 0 0 8

fp8 BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
  8: 64 256 4 5 2 0
 16: ≤16383 64 256 4 5 2 0; 64 256 4 4 3 0
 32: ≤16383 64 256 4 4 2 0; 64 256 4 3 3 0
 64: ≤16383 64 256 4 3 2 0; 128 128 8 4 1 0

fp8_parts BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH SPLITS
  8: ≤8192 64 256 4 4 0 1 4; 64 256 4 6 0 0 4
 16: ≤8192 64 256 4 4 0 1 4; 64 256 4 6 0 0 4
 32: ≤8192 64 256 4 4 0 0 8; 64 256 4 4 0 0 4
 64: 64 128 4 5 0 0 4

fp8_blocks BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
 16: 64 128 4 8 2 0
any: 64 128 4 5 2 0

fp8_blocks_parts BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH SPLITS
 16: 64 128 4 8 0 0 4
any: 64 128 4 5 0 0 4

int8_straight BLOCK_N BLOCK_K num_warps FRAGMENTS
  8: ≤16383 32 256 4 1; 16 256 4 1
 16: ≤16383 32 256 4 1; 32 256 2 1

int8_straight_parts BLOCK_N BLOCK_K num_warps FRAGMENTS SPLITS
any: ≤8192 32 128 4 1 4; 32 128 4 2 4

try_dense BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH  # tuning, for so many rows
  8: 64 256 4 3 0 1; 32 256 2 4 0 1; 64 128 4 4 2 0; 64 128 4 4 3 1
 16: 128 128 4 3 2 0; 64 128 4 4 2 0; 64 256 4 3 2 1; 64 128 4 4 3 0
 64: 64 64 4 4 3 0; 128 64 8 4 2 0; 64 128 4 3 2 0; 128 64 8 5 1 0

packed_8_bits BLOCK_T BLOCK_N BLOCK_K num_warps num_stages REGISTERS WIDE AHEAD DIRECT
 16: ≤16383 16 64 128 4 3 128 1 0 1; 16 64 256 4 3 256 1 0 1
 32: ≤16383 32 128 128 8 3 128 1 0 1; 32 64 256 4 2 256 1 0 1
 64: ≤16383 64 64 256 4 3 256 1 0 1; 64 128 128 8 3 128 1 2 1; 64 64 128 4 4 128 1 2 0
128: ≤8192 128 128 128 8 3 256 1 0 1; ≤16383 128 128 128 8 4 256 0 0 0; 128 256 128 8 3 256 0 0 1;
     128 64 128 4 2 128 0 2 0
any: ≤5999 256 128 128 8 3 256 0 0 0; ≤8192 256 128 128 8 3 256 1 0 1; 256 128 128 8 3 256 0 0 0
packed_4_bits …
 16: ≤8192 16 64 256 4 3 128 1 0 1; ≤16383 16 128 256 8 3 128 1 0 1; 16 64 256 4 2 256 1 0 1
 32: ≤8192 32 128 256 8 3 256 1 0 1; ≤16383 32 128 256 8 3 128 1 0 1; 32 64 256 4 2 128 1 0 1
 64: ≤16383 64 64 256 4 3 256 1 0 1; 64 64 256 4 2 256 1 0 1; 64 128 256 8 2 128 0 0 0
128: 128 128 256 8 2 256 0 0 1; ≤16383 64 128 256 8 2 128 0 0 0; 128 64 128 4 2 128 0 2 0
any: 128 128 256 8 2 256 1 0 1; ≤8192 256 128 128 8 3 256 0 0 0; 128 64 128 4 2 128 0 0 0
packed_small …  # not measured
 64: 64 128 128 8 3 128 0 0 0
any: 128 128 128 8 3 256 0 0 0

large_int8 BLOCK_M BLOCK_N MORE_N BLOCK_K num_warps num_stages PIECES PROGRAMS RATE
any: 128 128 0 128 4 3 2 2 115; 128 256 0 128 8 4 2 1 100; 256 128 64 128 8 3 2 1 98;
     128 128 64 128 8 4 1 1 87; 128 128 0 128 8 4 1 1 83; 64 128 0 128 4 5 1 1 65; 64 64 0 256 4 4 1 1 50
large_int8_groups …
any: 128 128 0 128 8 4 1 1 100; 64 128 0 128 4 5 1 1 85; 64 64 0 128 4 5 1 1 60

large_int8_parts BLOCK_M BLOCK_N MORE_N BLOCK_K num_warps num_stages PIECES PROGRAMS  # up to 64 rows
any: 64 64 0 256 4 3 1 0
large_int8_parts_groups …
any: 64 64 0 128 4 5 1 0

warpgroups GROUPS BLOCK_T PIECE PROGRAMS RATE
128: 2 128 64 1 95
any: 1 256 64 1 64; 2 256 64 1 85; 3 256 32 1 82
warpgroups_four …  # 4 bits inside 8
 32: 1 32 32 4 40
 64: 1 64 32 3 60
128: 1 128 64 2 70; 3 128 64 1 75
any: 1 256 64 1 60; 2 256 64 1 85
warpgroups_groups …  # 4 bits inside 8, rows with groups
 32: 1 32 32 3 30
 64: 1 64 32 2 40
128: 1 128 64 1 40
warpgroups_blocks …  # e4m3, a weight in blocks
  8: 1 8 0 1 60; 3 8 0 1 60
 16: 1 16 0 1 60; 3 16 0 1 60
 32: 1 32 0 1 60; 3 32 0 1 60
 64: 1 64 64 1 60; 3 64 64 1 60
warpgroups_blocks_parts GROUPS BLOCK_T PIECE PROGRAMS num_stages RATE
  8: 1 8 0 2 6 60
 16: 1 16 0 2 6 60
 32: 1 32 0 2 6 60
 64: 1 64 0 2 5 60
""")
