"""Decode attention as one stream of tiles against float64, and its bits against its own in other company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.paged_stream import paged_stream_triton, stream_tiles
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
    "mha": (2, 2, 128, 64, 0),
    "mha small blocks": (2, 2, 64, 4, 0),
    "group of 2, window": (4, 2, 80, 32, 7),
    "group of 4": (4, 1, 128, 64, 0),
    "group of 7": (7, 1, 64, 16, 0),
    "group of 8, window": (8, 1, 96, 64, 100),
    "group of 20": (20, 1, 48, 128, 0),
    "wide head": (2, 1, 256, 64, 0),
    "tiny head": (2, 1, 8, 8, 200),
}
SHORT = {"MIN_SPLIT": 32, "BLOCK_N": 32, "OVERLAP": 1}
VARIANTS = {
    "default": {},
    "keys first": {"AXIS": 2, "num_warps": 4, "RUN": 2},
    "merged by a launch": {**SHORT, "MERGE": 1, "RUN": 4},
    "few splits": {"BLOCK_N": 16, "MIN_SPLIT": 16, "MAX_SPLITS": 3, "RUN": 2},
    "tiles over blocks": {"BLOCK_N": 64, "MIN_SPLIT": 64, "RUN": 8},
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
    tiles = VARIANTS[variant]
    out = paged_stream_triton(q, *where(case), scale, max(LENGTHS), window, tiles, None, arrivals)
    assert_near(out, expected64(q, case, scale, window))
    assert (out[1] == 0).all(), "a padding row is zeros"
    assert not arrivals.any(), "the last to arrive leaves the counts at zero"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("changes", [{}, {"AXIS": 2}, {"MERGE": 1}])
def test_bits_follow_the_length_alone(device: str, heads: int, changes: dict[str, int]) -> None:
    """Neither the batch, nor max_seq_len, nor how many spans a program walks."""
    lengths = [290, 3, 600]
    case = paged_case(lengths, kv_heads=2, head_dim=32, block_size=64, dtype=torch.float16, device=device)
    q = normal(3, heads, 32, dtype=torch.float16, device=device)
    tiles = {"BLOCK_N": 32, "MIN_SPLIT": 64, "MAX_SPLITS": 7, **changes}
    together = paged_stream_triton(q, *where(case), 0.2, 600, tiles={**tiles, "RUN": 4})
    for run in (1, 2, 8):
        again = paged_stream_triton(q, *where(case), 0.2, 600, tiles={**tiles, "RUN": run})
        assert torch.equal(again, together)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        for bound in (length, 5000):
            alone = paged_stream_triton(q[one], *where(case, one), 0.2, bound, tiles={**tiles, "RUN": 1})
            assert torch.equal(alone, together[one])


@pytest.mark.parametrize("device", DEVICES)
def test_slices_of_larger_tensors_and_an_empty_batch(device: str) -> None:
    case = paged_case([200, 150], kv_heads=2, head_dim=32, block_size=16, dtype=torch.float16, device=device)
    q = normal(9, 6, 32, dtype=torch.float16, device=device)[:, :2]
    out = paged_stream_triton(q[4:6], *where(case), 0.2, 200)
    assert_near(out, expected64(q[4:6], case, 0.2, 0))
    assert paged_stream_triton(q[:0], *where(case, slice(0, 0)), 0.2, 0).shape == (0, 2, 32)


def test_a_program_walks_more_spans_in_a_larger_batch() -> None:
    runs = [stream_tiles(8, 128, 2, batch, torch.device("cpu"))["RUN"] for batch in (1, 8, 16, 32, 64, 256)]
    assert runs == [1, 1, 2, 4, 8, 8]
    rest = [stream_tiles(8, 128, 2, batch, torch.device("cpu")) | {"RUN": 0} for batch in (1, 64)]
    assert rest[0] == rest[1], "nothing that changes bits follows the batch"


@pytest.mark.parametrize("tiles", [{"AXIS": 4}, {"MERGE": 4}, {"OVERLAP": 8}, {"UNKNOWN": 1}])
def test_refused(tiles: dict[str, int]) -> None:
    case = paged_case([3], kv_heads=1, head_dim=16, block_size=16, dtype=torch.float16)
    with pytest.raises(IngotError, match="tile"):
        paged_stream_triton(torch.zeros(1, 1, 16).half(), *where(case), 1.0, 3, tiles=tiles)
