"""Default tiles of products by rows and shape, as measured on an H200, and what is worth trying.

Owns the tables and the look-up. Knows no kernel and no GPU.

    tiles = chosen("dense", rows=8, size=4096)      # {"BLOCK_N": 32, "BLOCK_K": 256, …}

A table has a name and the names of its tiles, or "…" for those of the table before it; a line is for up to so
many rows and outputs (of parts of sums: inputs), 0 for any. The first line that fits is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

Tiles = dict[str, int]


class Line(NamedTuple):
    """Tiles for up to so many rows and so large a size; 0: any."""

    rows: int
    size: int
    tiles: Tiles


def _parsed(text: str) -> dict[str, list[Line]]:
    tables: dict[str, list[Line]] = {}
    lines: list[Line] = []
    names: list[str] = []
    for words in (line.partition("#")[0].split() for line in text.splitlines()):
        if words and words[0].isdecimal():
            rows, size, *tiles = (int(word) for word in words)
            lines.append(Line(rows, size, dict(zip(names, tiles, strict=True))))
        elif words:
            lines = tables.setdefault(words[0], [])
            names = names if words[1] == "…" else words[3:]
    return tables


@functools.lru_cache(maxsize=4096)
def _line(table: str, rows: int, size: int, wanted: Callable[[Tiles], bool] | None) -> Line:
    return next(
        line
        for line in TABLES[table]
        if rows <= (line.rows or rows)
        and size <= (line.size or size)
        and (wanted is None or wanted(line.tiles))
    )


def chosen(table: str, rows: int, size: int, wanted: Callable[[Tiles], bool] | None = None) -> Tiles:
    """The first tiles of a table for so many rows and so large a size, of those that are ``wanted``."""
    return dict(_line(table, rows, size, wanted).tiles)


def listed(table: str, rows: int = 0) -> list[Tiles]:
    """All tiles of a table for so many rows."""
    most = next(line.rows for line in TABLES[table] if rows <= (line.rows or rows))
    return [dict(line.tiles) for line in TABLES[table] if line.rows == most]


def each_once(found: list[Tiles]) -> list[Tiles]:
    """Every choice at its first place."""
    return [tiles for place, tiles in enumerate(found) if tiles not in found[:place]]


# Products of few rows were measured in steps of a 7B model. Up to 8 rows launches overlap enough that early
# weights are worth most; from 16 rows on x is worth pipelining, and equal shares.
# int8_straight: a weight of 4 bits inside 8 is loaded straight into registers, as it is stored
# (benchmarks/int8_variants.py); FRAGMENTS 1: a warp asks for a chunk at its step, 2: for one ahead.
# packed: of those with DIRECT x is in the operand's order (benchmarks/narrow_variants.py, packed_matmul.py).
# large_int8: a tensor-core product whose sums are whole numbers is waited for where it is issued: the
# compiler lets only sums in fp32 run on. Two programs of one warp group each wait at different times; an H200
# reaches 1380 to 1420 TOPS so, 1200 to 1240 by the second line. RATE is what is expected, in % of that.
TABLES = _parsed("""
dense rows size BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
 8 16383  32 256 2 4 0   1
 8     0  64 256 4 3 0   1
16 16383  64 128 4 4 2 256
16 65535  64 128 4 3 3 128
16     0 128 128 4 3 2   0
32 16383  64 128 4 4 2 128
32 65535  64 128 4 3 3   0
32     0 128 128 8 4 1 128
64 16383 128  64 8 5 1   0
64 65535  64  64 4 4 3   0
64     0 128  64 4 4 2   0

dense_parts rows size BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH SPLITS
 8  8192  64 256 4 3 0   1 4
 8     0 128 128 4 3 0   2 8
16  8192  64 128 4 4 2   0 4
16     0  64 256 4 3 2   1 4
32  8192  64 128 4 3 2 128 4
32     0 128 128 8 4 1 128 4
64     0 128  64 8 5 1 128 4

float rows size BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
0 0 16 64 2 3 0 1

float_parts rows size BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH SPLITS
0 0 16 64 2 3 0 1 1

8_bits rows size BLOCK_N num_warps num_stages PROGRAMS PREFETCH  # BLOCK_K is a chunk of the layout
 8 16383  64 4 8 3 0
 8     0  64 2 6 4 0
16     0  64 4 6 3 0
32 16383 128 8 6 1 0
32     0 128 4 4 2 0
64 16383  64 4 4 2 0
64     0 128 8 4 2 0

8_bits_parts rows size BLOCK_N num_warps num_stages PROGRAMS PREFETCH SPLITS
 8  8192 128 8 4 2 0 8
 8     0  64 4 6 2 0 4
16     0 128 8 6 1 0 8
32     0 128 8 4 1 0 8
64  8192  64 4 4 2 0 4
64     0 128 8 4 1 0 8

4_bits rows size BLOCK_N num_warps num_stages PROGRAMS PREFETCH
 8 16383  64 4 6 2 0
 8     0  64 4 6 3 0
16 16383 128 8 6 1 0
16     0  32 2 4 6 0
32 16383  64 4 4 2 0
32     0 128 8 4 2 0
64     0 128 8 4 1 0

4_bits_parts rows size BLOCK_N num_warps num_stages PROGRAMS PREFETCH SPLITS
 8  8192  64 4 6 0 1 8
 8     0 128 4 4 2 0 8
16     0  64 4 4 2 0 8
32  8192 128 8 4 1 0 8
32     0  64 4 4 2 0 4
64     0 128 8 4 1 0 4

8_bits_straight rows size BLOCK_N num_warps FRAGMENTS SPLITS  # the best at 8 rows
0 16383 32 4 1 1
0 65535 64 4 1 1
0     0 32 2 1 1

8_bits_straight_parts …
0 0 32 2 2 8

4_bits_straight …
0 16383 32 4 1 1
0     0 32 2 1 1

4_bits_straight_parts …
0 8192 32 4 1 4
0    0 32 2 2 4

int8 rows size BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH
 8 16383  32 256 2 6 0 1
 8     0  64 256 4 4 3 1
16 16383  64 256 4 5 2 0
16     0  64 256 4 4 3 0
32 16383  64 256 4 4 2 0
32     0  64 256 4 3 3 0
64 16383  64 128 4 6 2 0
64     0 128 128 4 4 2 0

int8_parts rows size BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH SPLITS
 8 8192  64 256 4 4 0 1 8
 8    0  64 256 4 6 0 1 4
16 8192  64 256 4 4 0 1 8
16    0  64 256 4 6 0 0 4
32 8192  64 256 4 4 0 0 8
32    0  64 256 4 4 0 0 4
64    0 128 128 4 4 0 0 8

int8_straight rows size BLOCK_N BLOCK_K num_warps FRAGMENTS
 8 16383 32 256 4 1
 8     0 16 256 4 1
16 16383 32 256 4 1
16     0 32 256 2 1

int8_straight_parts rows size BLOCK_N BLOCK_K num_warps FRAGMENTS SPLITS
0 8192 32 128 4 1 4
0    0 32 128 4 2 4

try_dense rows size BLOCK_N BLOCK_K num_warps num_stages PROGRAMS PREFETCH  # tuning, for so many rows
 8 0  64 256 4 3 0 1
 8 0  32 256 2 4 0 1
 8 0  64 128 4 4 2 0
 8 0  64 128 4 4 3 1
16 0 128 128 4 3 2 0
16 0  64 128 4 4 2 0
16 0  64 256 4 3 2 1
16 0  64 128 4 4 3 0
64 0  64  64 4 4 3 0
64 0 128  64 8 4 2 0
64 0  64 128 4 3 2 0
64 0 128  64 8 5 1 0

try_int8 …
16 0  32 256 2 6 0 1
16 0  64 256 4 4 0 1
16 0  64 256 4 4 3 0
16 0  64 128 4 8 2 1
16 0 128 128 4 5 2 0
16 0  64 512 4 3 2 1
64 0  64 256 4 4 2 0
64 0 128 128 4 5 2 0
64 0 128 256 8 3 1 0
64 0  64 128 4 6 3 0
64 0 128 128 8 4 2 1

packed_8_bits rows size BLOCK_T BLOCK_N BLOCK_K num_warps num_stages REGISTERS WIDE AHEAD DIRECT
 16 16383  16  64 128 4 3 128 1 0 1
 16     0  16  64 256 4 3 256 1 0 1
 32 16383  32 128 128 8 3 128 1 0 1
 32     0  32  64 256 4 2 256 1 0 1
 64 16383  64  64 256 4 3 256 1 0 1
 64     0  64 128 128 8 3 128 1 2 1
 64     0  64  64 128 4 4 128 1 2 0
128  8192 128 128 128 8 3 256 1 0 1
128 16383 128 128 128 8 4 256 0 0 0
128     0 128  64 128 4 2 128 0 2 0
  0  8192 128  64 128 4 3 256 1 0 1
  0 16383 256 128 128 8 3 256 0 0 0
  0     0 128  64 128 4 3 256 1 0 1
  0     0 256 128 128 8 3 256 0 0 0

packed_4_bits …
 16  8192  16  64 256 4 3 128 1 0 1
 16 16383  16 128 256 8 3 128 1 0 1
 16     0  16  64 256 4 2 256 1 0 1
 32  8192  32 128 256 8 3 256 1 0 1
 32 16383  32 128 256 8 3 128 1 0 1
 32     0  32  64 256 4 2 128 1 0 1
 64 16383  64  64 256 4 3 256 1 0 1
 64     0  64  64 256 4 2 256 1 0 1
 64     0  64 128 256 8 2 128 0 0 0
128 16383 128 128 256 8 2 256 1 0 1
128 16383  64 128 256 8 2 128 0 0 0
128     0 128  64 128 4 2 128 0 2 0
  0     0 128 128 256 8 2 256 1 0 1
  0  8192 256 128 128 8 3 256 0 0 0
  0     0 128  64 128 4 2 128 0 0 0

packed_small …  # not measured
64 0  64 128 128 8 3 128 0 0 0
 0 0 128 128 128 8 3 256 0 0 0

try_packed_few_256 rows size BLOCK_N BLOCK_K num_warps num_stages REGISTERS WIDE AHEAD DIRECT  # chunks of 256
0 0  64 256 4 3 256 1 0 1
0 0  64 256 4 2 256 1 0 1
0 0  64 256 4 3 128 0 0 1
0 0 128 256 8 3 128 0 0 1
0 0 128 256 8 3 256 1 0 1
0 0 128 256 8 2 128 0 0 0
0 0  64 256 4 3 128 1 2 0

try_packed_few_128 …
0 0  64 128 4 3 128 1 0 1
0 0  64 128 4 4 256 1 0 1
0 0 128 128 8 3 128 1 0 1
0 0 128 128 8 3 128 1 2 1
0 0  64 256 4 2 256 1 0 1
0 0  64 256 4 3 256 1 0 1
0 0  64 256 4 3 128 1 0 1
0 0 128 256 8 3 256 1 0 1
0 0 128 256 8 3 128 1 0 1
0 0  64 128 4 4 128 1 2 0

try_packed_many rows size BLOCK_T BLOCK_N BLOCK_K num_warps num_stages REGISTERS WIDE AHEAD DIRECT
0 0 128 128 128 8 2 128 0 0 0
0 0 128 128 128 8 4 256 0 0 0
0 0 128 256 128 8 3 256 0 0 0
0 0 128  64 128 4 2 128 0 0 0
0 0  64 128 128 8 3 128 0 0 0
0 0  64 256 128 8 3 256 0 0 0

try_packed_many_256 …
0 0 256 128 128 8 2 256 0 0 0
0 0 256 128 128 8 3 256 0 0 0
0 0 256  64 128 4 2 256 0 0 0

try_packed_many_chunks …
0 0 128 128 256 8 2 256 0 0 0
0 0  64 128 256 8 2 128 0 0 0

try_packed_many_ahead …
0 0  64 128 128 8 3 128 1 2 0
0 0 128  64 128 4 2 128 0 2 0

try_packed_many_straight_256 …
0 0  64 128 256 8 2 256 1 0 1
0 0 128  64 256 4 2 256 1 0 1
0 0 128 128 256 8 2 256 1 0 1

try_packed_many_straight …
0 0  64 128 128 8 3 128 1 0 1
0 0 128  64 128 4 3 256 1 0 1
0 0 128 128 128 8 3 256 1 0 1

try_packed_many_straight_large …
0 0 256 128 128 8 3 256 1 0 1

try_packed_many_straight_small …
0 0 128 128 128 8 3 128 1 0 1

try_packed_many_straight_double …
0 0 128  64 256 4 2 256 1 0 1
0 0 128 128 256 8 2 256 1 0 1
0 0  64 128 256 8 2 256 1 0 1

large_int8 rows size BLOCK_M BLOCK_N MORE_N BLOCK_K num_warps num_stages PIECES PROGRAMS RATE
0 0 128 128  0 128 4 3 2 2 115
0 0 128 256  0 128 8 4 2 1 100
0 0 256 128 64 128 8 3 2 1  98
0 0 128 128 64 128 8 4 1 1  87
0 0 128 128  0 128 8 4 1 1  83
0 0  64 128  0 128 4 5 1 1  65
0 0  64  64  0 256 4 4 1 1  50

large_int8_groups …
0 0 128 128 0 128 8 4 1 1 100
0 0  64 128 0 128 4 5 1 1  85
0 0  64  64 0 128 4 5 1 1  60

try_large_int8 rows size BLOCK_M BLOCK_N MORE_N BLOCK_K num_warps num_stages PIECES PROGRAMS
0 0 128 256 0 128 8 3 2 1
0 0 256 128 0 128 8 3 2 1
0 0 128 128 0 128 8 3 1 1
0 0 128  64 0 128 4 3 1 2
0 0  64 128 0 128 4 3 1 2

large_int8_parts …  # up to 64 rows
0 0 64 64 0 256 4 3 1 0

large_int8_parts_groups …
0 0 64 64 0 128 4 5 1 0
""")
