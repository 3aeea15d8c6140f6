"""Decode attention over the paged cache against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.config.step_sizes import batch_buckets
from ingot.errors import IngotError
from ingot.kernels.attention import paged_attention as module
from ingot.kernels.attention import paged_stream
from ingot.kernels.attention.paged_attention import candidate_tiles, default_tiles
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.tiles import single_tiles, stream_tiles
from tests.kernels.flat_calls import paged_attention, paged_attention_triton
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, in_fp32, normal
from tests.kernels.paged_case import PagedCase, attention64, paged_case

LENGTHS = [5, 0, 300, 64, 1]
CASES = {
    # heads, kv_heads, head_dim, block_size, window
    "mha": (2, 2, 64, 64, 0),
    "mha_small_blocks": (2, 2, 128, 4, 0),
    "mha_window": (1, 1, 48, 16, 100),
    "mha_tiny_head": (1, 1, 8, 32, 0),
    "gqa": (4, 2, 128, 64, 0),
    "gqa_7": (7, 1, 64, 16, 0),
    "gqa_window": (4, 2, 80, 32, 7),
    "mqa_many": (20, 1, 96, 128, 0),
    "gqa_tiny_head": (2, 1, 8, 8, 200),
}


def expected64(q: torch.Tensor, case: PagedCase, scale: float, window: int) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, keys in enumerate(case.keys):
        if len(keys):
            last = torch.tensor([len(keys) - 1], device=q.device)
            out[row] = attention64(q[row : row + 1], keys, case.values[row], last, scale, window)[0]
    return out


def paged_arguments(case: PagedCase) -> tuple[Any, ...]:
    return case.key_cache, case.value_cache, case.block_tables, case.seq_lens


@pytest.mark.stays(*in_fp32(CASES, halves=("mha_small_blocks", "gqa", "gqa_tiny_head")))
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_paged_attention(impl: Implementation, dtype: torch.dtype, name: str) -> None:
    heads, kv_heads, head_dim, block_size, window = CASES[name]
    case = paged_case(
        LENGTHS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=impl.device,
    )
    q = normal(len(LENGTHS), heads, head_dim, dtype=dtype, device=impl.device)
    scale = head_dim**-0.5
    op = impl(paged_attention, paged_attention_triton)
    out = op(q, *paged_arguments(case), scale, max(LENGTHS), window)
    assert_near(out, expected64(q, case, scale, window))
    assert (out[1] == 0).all(), "a padding row is zeros"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [2, 4])
def test_rows_that_see_the_same_keys(impl: Implementation, heads: int) -> None:
    """As the tokens of a prompt see what was heard: the twin computes neighbours together."""
    shape: dict[str, Any] = {"kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": torch.float32}
    case = paged_case(LENGTHS, **shape, device=impl.device)
    rows = [0, 0, 1, 1, 2, 3, 3, 3, 2, 4]
    q = normal(len(rows), heads, 64, dtype=torch.float32, device=impl.device)
    tables, lens = case.block_tables[rows], case.seq_lens[rows]
    op = impl(paged_attention, paged_attention_triton)
    found = op(q, case.key_cache, case.value_cache, tables, lens, 0.125, max(LENGTHS))
    for i, row in enumerate(rows):
        keys, values = case.keys[row], case.values[row]
        if len(keys):
            last = torch.tensor([len(keys) - 1], device=q.device)
            assert_near(found[i], attention64(q[i : i + 1], keys, values, last, 0.125, 0)[0])
        else:
            assert not found[i].any()


def test_the_reference_reads_the_keys_of_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = paged_case([40, 40], kv_heads=2, head_dim=8, block_size=16, dtype=torch.float32, device="cpu")
    reads, gather = [], PagedCache.gather

    def counted(*given: Any) -> Any:
        reads.append(given)
        return gather(*given)

    monkeypatch.setattr(PagedCache, "gather", counted)
    tables = case.block_tables[[0] * 30 + [1]]
    paged_attention(normal(31, 2, 8, dtype=torch.float32), case.key_cache, case.value_cache, tables,
                    case.seq_lens[[0] * 30 + [1]], 0.3, 40)  # fmt: skip
    assert len(reads) == 2


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [1, 2])
def test_one_split_two_splits_and_other_tiles(impl: Implementation, heads: int) -> None:
    lengths = [90, 0, 17]
    case = paged_case(
        lengths, kv_heads=1, head_dim=16, block_size=32, dtype=torch.float32, device=impl.device
    )
    q = normal(3, heads, 16, dtype=torch.float32, device=impl.device)
    op = impl(paged_attention, paged_attention_triton)
    one = op(q, *paged_arguments(case), 0.3, 90)
    assert_near(one, expected64(q, case, 0.3, 0))
    loose_bound = op(q, *paged_arguments(case), 0.3, 4000)
    assert torch.equal(one, loose_bound), "max_seq_len sizes the launch and nothing else"
    tiles = {"BLOCK_N": 16, "MAX_SPLITS": 3, "num_warps": 2, "num_stages": 1}
    assert_near(op(q, *paged_arguments(case), 0.3, 90, tiles=tiles), expected64(q, case, 0.3, 0))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [2, 4])
def test_alone_is_bitwise_as_in_a_batch(impl: Implementation, heads: int) -> None:
    """With the same tiles, which follow the number of requests."""
    case = paged_case(
        [290, 3, 600], kv_heads=2, head_dim=32, block_size=64, dtype=torch.float16, device=impl.device
    )
    q = normal(3, heads, 32, dtype=torch.float16, device=impl.device)
    op = impl(paged_attention, paged_attention_triton)
    tiles = default_tiles(2, heads // 2, 32, 2, q.device, 64)
    together = op(q, *paged_arguments(case), 0.2, 600, tiles=tiles)
    for row, length in enumerate([290, 3, 600]):
        one = slice(row, row + 1)
        alone = op(
            q[one],
            case.key_cache,
            case.value_cache,
            case.block_tables[one],
            case.seq_lens[one],
            0.2,
            length,
            tiles=tiles,
        )
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_arrivals_serve_every_call_and_slices_of_larger_tensors_are_taken(impl: Implementation) -> None:
    """Two decode rows between others, as in a step that mixes decodes and prompt chunks."""
    case = paged_case(
        [200, 700, 65, 1], kv_heads=2, head_dim=32, block_size=16, dtype=torch.float16, device=impl.device
    )
    q = normal(9, 6, 32, dtype=torch.float16, device=impl.device)[:, :2]
    arrivals = torch.zeros(8, dtype=torch.int32, device=impl.device)
    op = impl(paged_attention, paged_attention_triton)
    some = slice(1, 3)
    caches = (case.key_cache, case.value_cache)
    tables, lens = case.block_tables[some], case.seq_lens[some]
    expected = expected64(torch.cat((q[:1], q[4:7])), case, 0.2, 0)[some]
    for _ in range(2):
        out = op(q[4:6], *caches, tables, lens, 0.2, 700, arrivals=arrivals)
        assert_near(out, expected)
        assert not arrivals.any(), "the last to arrive leaves the counts at zero"


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("batch", [1, 64, 256])
def test_every_candidate_is_right(impl: Implementation, heads: int, batch: int) -> None:
    """Those of a larger batch too, on two requests."""
    case = paged_case(
        [300, 129], kv_heads=2, head_dim=64, block_size=64, dtype=torch.float16, device=impl.device
    )
    q = normal(2, heads, 64, dtype=torch.float16, device=impl.device)
    arguments = (2, heads // 2, 64, 2, q.device, batch)
    candidates = candidate_tiles(*arguments)
    assert candidates[0] == default_tiles(*arguments)
    assert len(candidates) <= 6
    op = impl(paged_attention, paged_attention_triton)
    for tiles in candidates:
        assert_near(op(q, *paged_arguments(case), 0.2, 300, tiles=tiles), expected64(q, case, 0.2, 0))


class Caught(Exception):
    """A launch that was not made."""


class Catcher:
    """A kernel that only says with which OVERLAP it would have run."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, OVERLAP: int, **kwargs: Any) -> None:
            raise Caught(OVERLAP)

        return launch


@pytest.mark.parametrize("heads", [2, 4], ids=["mha", "gqa"])
def test_keys_are_asked_for_before_the_wait(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """On a GPU that overlaps, by any number of requests; what a caller or a plan says goes before it."""
    cpu = torch.device("cpu")
    assert default_tiles(2, heads // 2, 16, 2, cpu)["OVERLAP"] == 1, "no GPU, no overlap"
    for where, kernel in ((module, "paged_attention_single_kernel"), (paged_stream, "paged_stream_kernel")):
        monkeypatch.setattr(where, kernel, Catcher())
    for where in (module, single_tiles, stream_tiles):
        monkeypatch.setattr(where, "overlaps", lambda device: True)
    for batch in (1, 2, 3, 64):
        case = paged_case([9] * batch, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float16)
        q = torch.zeros(batch, heads, 16, dtype=torch.float16)
        for tiles in (None, {"OVERLAP": 1}, {"OVERLAP": 2}, {"num_warps": 2}):
            with pytest.raises(Caught) as caught:
                paged_attention_triton(q, *paged_arguments(case), 0.2, 9, tiles=tiles)
            assert caught.value.args == ((tiles or {}).get("OVERLAP", 4),)
        assert len(candidate_tiles(2, heads // 2, 16, 2, cpu, batch)) <= 7


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(1, (64, 32, 2)), (2, (64, 8, 2)), (3, (16, 8, 1)), (8, (16, 8, 1)), (64, (16, 8, 1))],
)
def test_a_few_requests_have_larger_tiles_and_more_splits(batch: int, expected: tuple[int, ...]) -> None:
    tiles = default_tiles(32, 1, 128, 2, torch.device("cpu"), batch)
    assert (tiles["BLOCK_N"], tiles["MAX_SPLITS"], tiles["num_warps"]) == expected


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 12, 32, 40])
@pytest.mark.parametrize("group", [1, 4])
def test_a_batch_padded_for_a_graph_has_its_tiles(kv_heads: int, group: int) -> None:
    cpu, buckets = torch.device("cpu"), batch_buckets(64)
    for batch in range(1, 65):
        bucket = next(size for size in buckets if size >= batch)
        tiles = [default_tiles(kv_heads, group, 128, 2, cpu, rows) for rows in (batch, bucket)]
        assert tiles[0] == tiles[1], batch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_overlap_does_not_change_bits(dtype: torch.dtype, head_dim: int) -> None:
    lengths = [640, 1, 65, 0, 4000]
    case = paged_case(lengths, kv_heads=4, head_dim=head_dim, block_size=64, dtype=dtype, device="cuda")
    for heads in (4, 16):
        q = normal(5, heads, head_dim, dtype=dtype, device="cuda")
        one, two, four = (
            paged_attention(q, *paged_arguments(case), 0.1, 4000, tiles={"OVERLAP": overlap})
            for overlap in (1, 2, 4)
        )
        assert torch.equal(one, two)
        assert torch.equal(one, four)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(impl: Implementation) -> None:
    case = paged_case([40], kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, device=impl.device)
    q = normal(1, 1, 16, dtype=torch.float32, device=impl.device) * 300
    out = impl(paged_attention, paged_attention_triton)(q, *paged_arguments(case), 1.0, 40)
    assert_near(out, expected64(q, case, 1.0, 0))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_empty_batch(impl: Implementation) -> None:
    case = paged_case([], kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, device=impl.device)
    q = torch.zeros(0, 2, 16, device=impl.device)
    assert impl(paged_attention, paged_attention_triton)(q, *paged_arguments(case), 1.0, 0).shape == (
        0,
        2,
        16,
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q", torch.zeros(2, 4, 300), "head_dim is out of range"),
        ("q", torch.zeros(2, 3, 16), "multiple"),
        ("q", torch.zeros(2, 16, 4).transpose(1, 2), "not contiguous"),
        ("q", torch.zeros(4, 2, 16).transpose(0, 1), "not contiguous within a row"),
        ("key_cache", torch.zeros(5, 2, 8, 16).half(), "key_cache has the wrong dtype"),
        ("block_tables", torch.zeros(2, 3, dtype=torch.int64), "block_tables has the wrong dtype"),
        ("seq_lens", torch.zeros(3, dtype=torch.int32), "seq_lens has the wrong shape"),
        ("window", -1, "window is out of range"),
        ("arrivals", torch.zeros(3, dtype=torch.int32), "arrivals is out of range"),
    ],
)
def test_refused(field: str, value: Any, message: str) -> None:
    arguments = {
        "q": torch.zeros(2, 4, 16),
        "key_cache": torch.zeros(5, 2, 8, 16),
        "value_cache": torch.zeros(5, 2, 8, 16),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "scale": 1.0,
        "max_seq_len": 8,
        "window": 0,
    }
    paged_attention(**arguments)
    with pytest.raises(IngotError, match=message):
        paged_attention(**{**arguments, field: value})
