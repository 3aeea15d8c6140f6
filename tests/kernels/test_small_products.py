"""The products of a decode step against float64, against the separate kernels, and row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.product.few_rows.resolved_launch import even_share
from ingot.kernels.product.few_rows.small_gate_up import small_gate_up
from ingot.kernels.product.few_rows.small_linear import small_linear, small_linear_parts
from ingot.kernels.tiles.product_tiles import MULTIPROCESSORS, candidate_tiles, small_tiles
from ingot.kernels.weight.stored_weight import stored
from tests.kernels.flat_calls import rope_kv_write, small_qkv, small_qkv_triton
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, launched, normal

EPS = 1e-6
NARROW = {"BLOCK_N": 16, "BLOCK_K": 32, "num_stages": 2}  # several tiles even of a small weight
EVEN = NARROW | {"PROGRAMS": 3, "PREFETCH": 0}  # tiles that are not full, so that programs have equal shares
SHAPES = [
    (1, 64, 80),
    (1, 37, 200),
    (1, 5, 1),
    (2, 33, 70),
    (5, 16, 128),
    (8, 50, 33),
    (16, 20, 96),
    (40, 70, 130),
]


def weights(rows: int, cols: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random weights whose products stay of order one."""
    return (normal(rows, cols, dtype=torch.float32, seed=1) / cols**0.5).to(device=device, dtype=dtype)


def normed64(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """RMSNorm in float64, rounded where the kernels round."""
    if weight is None:
        return x.double()
    wide = x.double()
    y = (wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt()).to(x.dtype)
    return (y.double() * weight.double()).to(x.dtype).double()


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize(("norm", "sums"), [(False, True), (True, False), (True, True)])
def test_small_linear(
    impl: Implementation, dtype: torch.dtype, rows: int, outputs: int, width: int, norm: bool, sums: bool
) -> None:
    x = normal(rows, width, dtype=dtype, device=impl.device)
    w = weights(outputs, width, dtype, impl.device)
    g = normal(width, dtype=dtype, device=impl.device, seed=2) if norm else None
    bias = normal(outputs, dtype=dtype, device=impl.device, seed=3) if sums else None
    residual = normal(rows, outputs, dtype=dtype, device=impl.device, seed=4) if sums else None
    y = impl(small_linear)(x, w, bias, residual, g, EPS, tiles=NARROW)
    expected = normed64(x, g) @ w.double().T
    if bias is not None and residual is not None:
        expected = expected + bias.double() + residual.double()
    assert_near(y, expected, loosen=2 if norm else 1)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner", "width"), [(1, 24, 96), (1, 7, 130), (3, 21, 40), (9, 16, 64)])
@pytest.mark.parametrize("tiles", [NARROW, EVEN])
def test_small_gate_up(
    impl: Implementation, dtype: torch.dtype, rows: int, inner: int, width: int, tiles: dict[str, int]
) -> None:
    x = normal(rows, width, dtype=dtype, device=impl.device)
    w = weights(2 * inner, width, dtype, impl.device)
    g = normal(width, dtype=dtype, device=impl.device, seed=2)
    y = impl(small_gate_up)(x, w, g, EPS, tiles=tiles)
    gate, up = (normed64(x, g) @ w.double().T).chunk(2, dim=1)
    assert_near(y, gate * torch.sigmoid(gate) * up, loosen=2)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(2, 20, 64), (9, 37, 200), (33, 16, 72), (3, 5, 20)])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 64])
def test_small_linear_parts(
    impl: Implementation, dtype: torch.dtype, rows: int, outputs: int, width: int, prefetch: int
) -> None:
    """Parts of unequal length, and fewer of them where there are not enough columns."""
    x = normal(rows, width, dtype=dtype, device=impl.device)
    w = weights(outputs, width, dtype, impl.device)
    tiles = NARROW | {"SPLITS": 4, "PREFETCH": prefetch, "PROGRAMS": 6 * prefetch}
    parts = impl(small_linear_parts)(x, w, tiles)
    assert parts.dtype == torch.float32
    assert parts.shape[1:] == (rows, outputs)
    torch.testing.assert_close(parts.double().sum(0), x.double() @ w.double().T, rtol=1e-4, atol=1e-4)


QKV_CASES = {
    # heads, kv_heads, head_dim, rotary_dim, logn_length, bias
    "plain": (4, 2, 16, 16, 0, False),
    "gpt2": (3, 3, 8, 0, 0, True),
    "partial": (6, 1, 12, 4, 0, False),
    "qwen": (2, 2, 32, 32, 8, True),
    "everything": (5, 5, 24, 8, 8, True),
    "wide": (3, 1, 64, 64, 0, True),
}
SLOTS = [37, -1, 0, 21, 5]
POSITIONS = [29, 0, 3, 40, 12]


def qkv_arguments(case: str, dtype: torch.dtype, device: str, rows: int) -> tuple[list[Any], dict[str, Any]]:
    heads, kv_heads, head_dim, rotary, logn, bias = QKV_CASES[case]
    outputs, width = (heads + 2 * kv_heads) * head_dim, 48
    table = None
    if rotary:
        angles = torch.arange(50)[:, None] * 100.0 ** (-torch.arange(rotary // 2) * 2 / rotary)
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions, slots = (torch.tensor(n[:rows], device=device) for n in (POSITIONS, SLOTS))
    shape = (3, kv_heads, 16, head_dim)
    caches = [torch.full(shape, fill, dtype=dtype, device=device) for fill in (7.0, 9.0)]
    product = [
        normal(rows, width, dtype=dtype, device=device),
        weights(outputs, width, dtype, device),
        normal(outputs, dtype=dtype, device=device, seed=3) if bias else None,
        normal(width, dtype=dtype, device=device, seed=2),
        EPS,
    ]
    place = [table, positions + 2, positions, slots, *caches, heads, kv_heads, head_dim]
    return product + place, {"logn_length": logn}


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("case", QKV_CASES)
@pytest.mark.parametrize("tiles", [NARROW, EVEN | {"PROGRAMS": 9}])
def test_small_qkv(
    impl: Implementation, dtype: torch.dtype, rows: int, case: str, tiles: dict[str, int]
) -> None:
    """The twin of rope_kv_write, itself checked against float64, in float64 from the product on."""
    arguments, options = qkv_arguments(case, dtype, impl.device, rows)
    q = impl(small_qkv, small_qkv_triton)(*arguments, **options, tiles=tiles)
    assert q.is_contiguous()
    x, w, bias, g, _, table, table_rows, positions, slots, *_ = arguments
    qkv = normed64(x, g) @ w.double().T + (0.0 if bias is None else bias.double())
    fresh = [torch.full(arguments[9].shape, fill, device=impl.device) for fill in (7.0, 9.0)]
    expected = rope_kv_write(
        qkv.float(), table, table_rows, positions, slots, *fresh, *arguments[11:14], **options
    )
    loosen = 4  # the product is rounded before the rotation, which subtracts rounded values
    assert_near(q, expected.double(), loosen)
    assert_near(arguments[9], fresh[0].double(), loosen)
    assert_near(arguments[10], fresh[1].double(), loosen)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [1, 4])
def test_fused_is_unfused_to_rounding(impl: Implementation, rows: int) -> None:
    """Against the ops it stands for, in fp16: at most one last bit of the product apart."""
    x = normal(rows, 64, dtype=torch.float16, device=impl.device)
    g = normal(64, dtype=torch.float16, device=impl.device, seed=2)
    w = weights(48, 64, torch.float16, impl.device)
    hidden, _ = rms_norm(x, g, EPS)
    near: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-3}
    y = impl(small_linear)(x, w, norm_weight=g, norm_eps=EPS)
    torch.testing.assert_close(y, torch.nn.functional.linear(hidden, w), **near)
    y = impl(small_gate_up)(x, w, g, EPS)
    torch.testing.assert_close(y, silu_mul(torch.nn.functional.linear(hidden, w)), **near)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("low", "high"), [(2, 8), (9, 16), (17, 32), (33, 64)])
def test_a_row_does_not_depend_on_its_company(impl: Implementation, low: int, high: int) -> None:
    x = normal(high, 96, dtype=torch.float16, device=impl.device)
    w, g = weights(32, 96, torch.float16, impl.device), normal(96, dtype=torch.float16, device=impl.device)
    op: Callable[..., torch.Tensor] = impl(small_linear)
    many = op(x, w, norm_weight=g, norm_eps=EPS)
    few = op(x[high - low :], w, norm_weight=g, norm_eps=EPS)
    if impl.interpreted or impl.device == "cuda":  # the twin's matrix library makes no such promise
        assert torch.equal(few, many[high - low :])
    else:
        torch.testing.assert_close(few, many[high - low :], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_strided_rows_and_no_rows(impl: Implementation) -> None:
    op = impl(small_linear)
    wide, w = (
        normal(4, 100, dtype=torch.float32, device=impl.device),
        weights(9, 60, torch.float32, impl.device),
    )
    x, residual = wide[:, :60], wide[:, 90:99]
    assert_near(op(x, w, residual=residual), x.double() @ w.double().T + residual.double())
    assert op(x[:0], w).shape == (0, 9)


@pytest.mark.parametrize("rows", [1, 2, 16, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_candidates_begin_with_the_default(rows: int, itemsize: int) -> None:
    weight = stored(torch.empty(4096, 11008, device="meta"))
    shape = (rows, weight, itemsize, torch.device("cpu"))
    found = candidate_tiles(*shape)
    assert found[0] == small_tiles(*shape)
    assert 3 <= len(found) <= 8
    assert all(tiles.keys() == found[0].keys() for tiles in found)
    assert all(tiles not in found[:place] for place, tiles in enumerate(found))


@pytest.mark.parametrize(("outputs", "width"), [(768, 768), (1024, 4096), (1280, 1280), (1280, 5120)])
def test_one_row_of_a_narrow_weight_keeps_a_gpu_busy(outputs: int, width: int) -> None:
    weight = stored(torch.empty(outputs, width, device="meta"))
    tiles = small_tiles(1, weight, 2, torch.device("cpu"))
    assert outputs // tiles["BLOCK_N"] >= 2 * MULTIPROCESSORS
    assert tiles["BLOCK_N"] > 1


def test_shares_are_even() -> None:
    """Full blocks by default; else as many waves of programs as blocks hold, each with as much to do."""
    cpu = torch.device("cpu")  # counts as two multiprocessors
    assert even_share(100, 32, {"PROGRAMS": 0}, cpu) == 32
    assert even_share(100, 32, {"PROGRAMS": 2}, cpu) == 25
    assert even_share(300, 32, {"PROGRAMS": 2}, cpu) == 25  # three waves
    assert even_share(7, 32, {"PROGRAMS": 8}, cpu) == 1
    assert even_share(100, 64, {"PROGRAMS": 4, "SPLITS": 4}, cpu) == 50


def test_refused() -> None:
    x, w = torch.zeros(2, 8), torch.zeros(6, 8)
    with pytest.raises(IngotError, match="number of rows"):
        small_linear(torch.zeros(65, 8), w)
    with pytest.raises(IngotError, match="weight has the wrong shape"):
        small_linear(x, torch.zeros(6, 9))
    with pytest.raises(IngotError, match="residual has the wrong shape"):
        small_linear(x, w, residual=torch.zeros(2, 8))
    with pytest.raises(IngotError, match="norm_weight has the wrong shape"):
        small_gate_up(x, w, torch.zeros(6))
    with pytest.raises(IngotError, match="two halves"):
        small_gate_up(x, torch.zeros(5, 8), torch.zeros(8))
    with pytest.raises(IngotError, match="unknown tile choice"):
        launched(small_linear)(x, w, tiles={"BLOCK": 32})
    arguments, options = qkv_arguments("plain", torch.float32, "cpu", 5)
    arguments[13] = 15
    with pytest.raises(IngotError, match="even"):
        small_qkv(*arguments, **options)
