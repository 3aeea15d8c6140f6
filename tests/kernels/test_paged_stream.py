"""Decode attention of shared keys against float64, and its bits against its own in other company."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.attention import paged_stream
from ingot.kernels.tiles import stream_tiles as rules
from ingot.kernels.tiles.stream_tiles import pair_programs, stream_tiles
from tests.kernels.flat_calls import paged_stream_triton
from tests.kernels.narrow_cache_case import narrow_case
from tests.kernels.numerics import DTYPES, assert_near, normal
from tests.kernels.paged_case import PagedCase, attention64, paged_case

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs here")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
LENGTHS = [5, 0, 290, 64, 1]
CASES = {
    # heads, kv_heads, head_dim, block_size, window
    "group of 2": (4, 2, 128, 64, 0),
    "small blocks": (4, 2, 64, 4, 0),
    "group of 2, window": (4, 2, 80, 32, 7),
    "group of 4": (4, 1, 128, 64, 0),
    "group of 7": (7, 1, 64, 16, 0),
    "group of 8, window": (8, 1, 96, 64, 100),
    "group of 20": (20, 1, 48, 128, 0),
    "wide head": (2, 1, 256, 64, 0),
    "tiny head": (2, 1, 8, 8, 200),
}
SHORT = {"MIN_SPLIT": 32, "BLOCK_N": 32, "OVERLAP": 1}
VARIANTS: dict[str, tuple[dict[str, int], int | None]] = {  # tiles, programs a pair
    "few pairs": ({}, None),
    "medium": ({"AXIS": 1, "MERGE": 2, "MIN_SPLIT": 256, "num_warps": 2}, None),
    "many pairs": (
        {"AXIS": 1, "MERGE": 2, "BLOCK_N": 32, "MIN_SPLIT": 256, "MAX_SPLITS": 16, "num_warps": 2},
        1,
    ),
    "merged by a launch": ({**SHORT, "AXIS": 1, "MERGE": 1}, 2),
    "few splits": ({"BLOCK_N": 16, "MIN_SPLIT": 16, "MAX_SPLITS": 3, "MERGE": 2}, 2),
    "more than a run": ({"BLOCK_N": 16, "MIN_SPLIT": 16, "AXIS": 1, "MERGE": 2, "OVERLAP": 1}, 1),
    "tiles over blocks": ({"BLOCK_N": 64, "MIN_SPLIT": 64, "MERGE": 2}, 1),
}


def expected64(q: torch.Tensor, case: PagedCase, scale: float, window: int) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, keys in enumerate(case.keys):
        if len(keys):
            last = torch.tensor([len(keys) - 1], device=q.device)
            out[row] = attention64(q[row : row + 1], keys, case.values[row], last, scale, window)[0]
    return out


def where(case: PagedCase, rows: slice = slice(None)) -> tuple[Any, ...]:
    return case.key_cache, case.value_cache, case.block_tables[rows], case.seq_lens[rows]


@pytest.mark.grid(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_stream(device: str, name: str, variant: str) -> None:
    heads, kv_heads, head_dim, block_size, window = CASES[name]
    dtype = DTYPES[(list(CASES).index(name) + list(VARIANTS).index(variant)) % 3]
    case = paged_case(
        LENGTHS, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=device
    )
    q = normal(len(LENGTHS), heads, head_dim, dtype=dtype, device=device)
    scale = head_dim**-0.5
    arrivals = torch.zeros(len(LENGTHS) * kv_heads, dtype=torch.int32, device=device)
    out = torch.full_like(q, math.nan)
    tiles, programs = VARIANTS[variant]
    bound = 3 * max(LENGTHS)
    paged_stream_triton(q, *where(case), scale, bound, window, tiles, out, arrivals, programs=programs)
    assert_near(out, expected64(q, case, scale, window))
    assert (out[1] == 0).all(), "a padding row is zeros"
    assert not arrivals.any(), "the last to arrive leaves the counts at zero"


@pytest.mark.grid(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("merge", [1, 2])
def test_bits_follow_the_length_alone(device: str, heads: int, axis: int, merge: int) -> None:
    """Neither the batch, nor max_seq_len, nor how many spans a program walks."""
    lengths = [290, 3, 480]  # the last in more spans than there may be
    case = paged_case(lengths, kv_heads=2, head_dim=32, block_size=64, dtype=torch.float16, device=device)
    q = normal(3, heads, 32, dtype=torch.float16, device=device)
    tiles = {"BLOCK_N": 32, "MIN_SPLIT": 64, "MAX_SPLITS": 7, "AXIS": axis, "MERGE": merge, "num_warps": 4}
    together = paged_stream_triton(q, *where(case), 0.2, 480, tiles=tiles)
    for programs in (1, 5):
        again = paged_stream_triton(q, *where(case), 0.2, 600, tiles=tiles, programs=programs)
        assert torch.equal(again, together)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        for bound in (length, 5000)[: 1 + (row < 2)]:
            alone = paged_stream_triton(q[one], *where(case, one), 0.2, bound, tiles=tiles, programs=3)
            assert torch.equal(alone, together[one])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("lengths", "block", "most"),
    [([16500, 4100, 70], 256, 4), ([300, 129, 5], 16, 64)],
    ids=["keys", "spans"],
)
def test_a_long_request_in_a_large_batch(device: str, lengths: list[int], block: int, most: int) -> None:
    """One program per pair is asked for: requests of many keys or spans take more, and get them."""
    case = paged_case(lengths, kv_heads=1, head_dim=16, block_size=512, dtype=torch.float16, device=device)
    q = normal(3, 2, 16, dtype=torch.float16, device=device)
    tiles = {"BLOCK_N": block, "MIN_SPLIT": block, "MAX_SPLITS": most, "AXIS": 1, "MERGE": 2, "OVERLAP": 1}
    for rows in (slice(0, 3), slice(1, 2)):
        out = torch.full_like(q[rows], math.nan)
        bound = max(lengths[rows])
        paged_stream_triton(q[rows], *where(case, rows), 0.25, bound, 0, tiles, out, programs=1)
        assert_near(out, expected64(q, case, 0.25, 0)[rows])


@pytest.mark.parametrize("device", DEVICES)
def test_slices_of_larger_tensors_and_an_empty_batch(device: str) -> None:
    case = paged_case([200, 150], kv_heads=2, head_dim=32, block_size=16, dtype=torch.float16, device=device)
    q = normal(9, 6, 32, dtype=torch.float16, device=device)[:, :2]
    out = paged_stream_triton(q[4:6], *where(case), 0.2, 200)
    assert_near(out, expected64(q[4:6], case, 0.2, 0))
    assert paged_stream_triton(q[:0], *where(case, slice(0, 0)), 0.2, 0).shape == (0, 2, 32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter alone stops at the wait")
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("block_size", [8, 32], ids=["tiles over blocks", "tiles in blocks"])
def test_before_the_wait_no_newest_key_is_read(
    monkeypatch: pytest.MonkeyPatch, axis: int, block_size: int
) -> None:
    """The kernel before writes queries and the newest keys: until a program waits these are NaN. (On a GPU
    test_on_gpu.py sees that the tiles after the first, which the compiler asks for as early, have none.)
    """
    lengths = [5, 0, 290, 64, 1, 17, 16, 49, 33]
    case = paged_case(lengths, kv_heads=2, head_dim=16, block_size=block_size, dtype=torch.float16)
    q = normal(len(lengths), 4, 16, dtype=torch.float16)
    tiles = {"BLOCK_N": 16, "MIN_SPLIT": 32, "AXIS": axis, "MERGE": 2}
    launch = (*where(case), 0.25, 3 * max(lengths), 0)
    wanted = paged_stream_triton(q, *launch, tiles | {"OVERLAP": 1}, programs=2)
    places = [(int(case.block_tables[row, (n - 1) // block_size]), (n - 1) % block_size)
              for row, n in enumerate(lengths) if n]  # fmt: skip
    written = [q, *(cache[block, :, place] for cache in where(case)[:2] for block, place in places)]
    values = [tensor.clone() for tensor in written]
    waits: list[int] = []

    def start(overlap: Any) -> None:
        waits.append(0)
        for tensor in written:
            tensor.fill_(math.nan)

    def arrive(overlap: Any) -> None:
        waits[-1] += 1
        for tensor, value in zip(written, values, strict=True):
            tensor.copy_(value)

    monkeypatch.setattr(paged_stream, "start_next", start)
    monkeypatch.setattr(paged_stream, "wait_for_previous", arrive)
    found = paged_stream_triton(q, *launch, tiles | {"OVERLAP": 4, "EARLY": 1}, programs=2)
    assert torch.equal(found, wanted)
    assert 0 not in waits, "every program waits: the next kernel relies on that"


class Caught(Exception):
    """A launch that was not made."""


@pytest.mark.parametrize(
    ("tiles", "narrow", "early"),
    [({}, False, 2), ({"EARLY": 0}, False, 0), ({"OVERLAP": 2}, False, 0), ({}, True, 0)],
    ids=["few pairs", "not asked for", "after the wait", "8 bits"],
)
def test_tiles_that_are_read_before_the_wait(
    monkeypatch: pytest.MonkeyPatch, tiles: dict[str, int], narrow: bool, early: int
) -> None:
    """As many as are in flight, by a launch that reads keys of 16 bits before it waits at all."""

    class Catcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*unused: Any, EARLY: int, **constants: Any) -> None:
                raise Caught(EARLY)

            return launch

    monkeypatch.setattr(paged_stream, "paged_stream_kernel", Catcher())
    monkeypatch.setattr(rules, "overlaps", lambda device: True)
    case: Any = paged_case([9], kv_heads=2, head_dim=16, block_size=16, dtype=torch.float16)
    if narrow:
        case = narrow_case(case, torch.int8)
    q = torch.zeros(1, 4, 16, dtype=torch.float16)
    scales = {"scales": case.scales} if narrow else {}
    with pytest.raises(Caught) as caught:
        paged_stream_triton(q, *where(case), 0.2, 9, tiles={"EARLY": 1} | tiles, **scales)
    assert caught.value.args == (early,)


@pytest.mark.parametrize(
    ("itemsize", "pairs", "expected"),
    [
        (2, 8, (64, 64, 64, 1, 1, 1, 64)),
        (2, 16, (64, 64, 64, 1, 1, 1, 32)),
        (2, 32, (64, 8, 256, 1, 2, 0, 8)),
        (2, 64, (64, 4, 256, 1, 2, 0, 4)),
        (2, 128, (64, 4, 256, 1, 2, 0, 2)),
        (2, 256, (64, 4, 2048, 1, 2, 0, 1)),
        (2, 512, (32, 4, 2048, 1, 2, 0, 1)),
        (1, 8, (64, 64, 128, 2, 1, 0, 16)),
        (1, 32, (64, 64, 128, 2, 1, 0, 4)),
        (1, 64, (64, 64, 256, 1, 2, 0, 4)),
        (1, 512, (64, 64, 128, 1, 2, 0, 1)),
    ],
)
def test_tiles_and_programs_follow_the_pairs(itemsize: int, pairs: int, expected: tuple[int, ...]) -> None:
    tiles = stream_tiles(pairs, 128, itemsize, torch.device("cpu"), 2)
    names = ("BLOCK_N", "MAX_SPLITS", "MIN_SPLIT", "AXIS", "MERGE", "EARLY")
    assert (*(tiles[name] for name in names), pair_programs(pairs, itemsize)) == expected


@pytest.mark.parametrize("tiles", [{"AXIS": 4}, {"MERGE": 4}, {"OVERLAP": 8}, {"EARLY": 2}, {"PROGRAMS": 1}])
def test_refused(tiles: dict[str, int]) -> None:
    case = paged_case([3], kv_heads=1, head_dim=16, block_size=16, dtype=torch.float16)
    with pytest.raises(IngotError, match="tile"):
        paged_stream_triton(torch.zeros(1, 1, 16).half(), *where(case), 1.0, 3, tiles=tiles)
