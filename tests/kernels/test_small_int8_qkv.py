"""The QKV product of a few rows in 8 bits against the product and the rotation apart."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.cache.cache_scales import CacheScales
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.cache.qkv_placement import Placement, QkvHeads, TokenPlaces
from ingot.kernels.product.few_rows import small_qkv as module
from ingot.kernels.rows.int8_rows import Int8Rows, int8_product
from tests.kernels.flat_calls import rope_kv_write, small_int8_qkv, small_int8_qkv_triton
from tests.kernels.int8_case import int8_rows, int8_weight
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.test_fp8_products import fp8_rows, fp8_weight
from tests.kernels.test_small_products import POSITIONS, QKV_CASES, SLOTS

TILES = {"BLOCK_N": 16, "BLOCK_K": 32, "num_stages": 2}


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", QKV_CASES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["rows", "static", "e4m3"])
@pytest.mark.parametrize("programs", [0, 6])
def test_small_int8_qkv(
    impl: Implementation, dtype: torch.dtype, case: str, rows: int, kind: str, programs: int
) -> None:
    heads, kv_heads, head_dim, rotary, logn, biased = QKV_CASES[case]
    outputs, width, device = (heads + 2 * kv_heads) * head_dim, 48, impl.device
    x, weight = int8_rows(rows, width, device, static=kind == "static"), int8_weight(outputs, width, device)
    if kind == "e4m3":
        x, weight = fp8_rows(rows, width, device), fp8_weight(outputs, width, device)
    bias = normal(outputs, dtype=dtype, device=device, seed=3) if biased else None
    table = None
    if rotary:
        angles = torch.arange(50)[:, None] * 100.0 ** (-torch.arange(rotary // 2) * 2 / rotary)
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions, slots = (torch.tensor(n[:rows], device=device) for n in (POSITIONS, SLOTS))
    shape = (3, kv_heads, 16, head_dim)
    caches = [torch.full(shape, fill, dtype=dtype, device=device) for fill in (7.0, 9.0, 7.0, 9.0)]
    place = (table, positions + 2, positions, slots)
    op = impl(small_int8_qkv, small_int8_qkv_triton)
    sizes = (heads, kv_heads, head_dim)
    q = op(x, weight, bias, *place, *caches[:2], *sizes, logn, tiles=TILES | {"PROGRAMS": programs})
    qkv = int8_product(x, weight, dtype, bias)
    expected = rope_kv_write(qkv, *place, *caches[2:], *sizes, logn_length=logn)
    for actual, wanted in zip((q, *caches[:2]), (expected, *caches[2:]), strict=True):
        assert actual.dtype == dtype
        assert_near(actual, wanted.double(), loosen=2)


def test_refused() -> None:
    cache, index = torch.zeros(1, 1, 16, 8), torch.zeros(2, dtype=torch.int64)
    place = (None, index, index, index, cache, cache, 1, 1, 8)
    x, weight = int8_rows(2, 16), int8_weight(24, 16)
    with pytest.raises(IngotError, match="weight has the wrong shape"):
        small_int8_qkv(x, int8_weight(23, 16), None, *place)
    with pytest.raises(IngotError, match="rows with groups"):
        small_int8_qkv(int8_rows(2, 16, group=8), weight, None, *place)
    with pytest.raises(IngotError, match="number of rows"):
        small_int8_qkv(int8_rows(65, 16), weight, None, *place)
    with pytest.raises(IngotError, match="positions has the wrong shape"):
        small_int8_qkv(x, weight, None, None, index, index[:1], index, cache, cache, 1, 1, 8)
    own = PagedCache(cache, cache, CacheScales.zeros(1, 1, 16, cache.device))
    narrow = Placement(None, TokenPlaces(index, index, index), own, QkvHeads(1, 1, 8))
    with pytest.raises(IngotError, match="cache in 8 bits"):
        module.small_int8_qkv(x, weight, None, narrow)
    none = Int8Rows(x.values[:0], x.scales[:0])
    empty = (None, *(index[:0] for _ in range(3)), cache, cache, 1, 1, 8)
    assert small_int8_qkv_triton(none, weight, None, *empty).shape == (0, 1, 8)
