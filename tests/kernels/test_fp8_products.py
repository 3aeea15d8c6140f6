"""Products of rows and weights in e4m3, against fp64 products of what NumPy reads in their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.product.int8 import fp8_library
from ingot.kernels.product.int8.fp8_library import library_takes
from ingot.kernels.product.int8.int8_linear import INVARIANT_FP8_TILES, int8_linear, int8_linear_parts
from ingot.kernels.product.int8.int8_matmul import int8_matmul_triton
from ingot.kernels.rows.int8_rows import E4M3, Int8Rows, Int8Weight, quantize_rows
from tests.kernels.int8_case import LARGE_TILES, int8_rows, int8_weight
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation, launched, normal
from tests.kernels.plain_e4m3 import plain

SMALL = {"BLOCK_N": 16, "BLOCK_K": 32, "num_stages": 2}
SHAPES = [(1, 37, 200), (2, 33, 70), (16, 20, 96), (64, 50, 172)]
OFF = 2e-3  # of the outputs' size: tensor cores keep few bits of sums of e4m3


def fp8_rows(rows: int, width: int, device: str = "cpu", group: int = 0) -> Int8Rows:
    """Normal rows of unlike magnitude."""
    x = normal(rows, width, dtype=torch.float32, device=device)
    return quantize_rows(x * (1 + torch.arange(rows, device=device) % 3)[:, None], group, dtype=E4M3)


def fp8_weight(outputs: int, width: int, device: str = "cpu") -> Int8Weight:
    """Normal weights that bring products to order one."""
    found = quantize_rows(normal(outputs, width, dtype=torch.float32, device=device, seed=1), dtype=E4M3)
    return Int8Weight(found.values, found.scales / width**0.5)


def exact(x: Int8Rows, weight: Int8Weight) -> torch.Tensor:
    """fp64 [M, N]."""
    scales = x.scales.double().cpu()
    wide = plain(x.values)
    wide = wide * (scales.repeat_interleave(x.group, 1) if x.group else scales[:, None])
    return wide @ plain(weight.values).T * weight.scales.double().cpu()


def assert_product(y: torch.Tensor, expected: torch.Tensor) -> None:
    error = (y.double().cpu() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < OFF + (0 if y.dtype == torch.float32 else torch.finfo(y.dtype).eps)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 256])
@pytest.mark.parametrize("grouped", [False, True])
def test_parts(
    impl: Implementation, rows: int, outputs: int, width: int, prefetch: int, grouped: bool
) -> None:
    group = {200: 40, 70: 14, 96: 32, 172: 43}[width] if grouped else 0
    x, weight = fp8_rows(rows, width, impl.device, group), fp8_weight(outputs, width, impl.device)
    tiles = SMALL | {"SPLITS": 3, "PREFETCH": prefetch}
    parts = impl(int8_linear_parts)(x, weight, tiles)
    assert isinstance(parts, torch.Tensor)
    assert parts.dtype == torch.float32
    assert_product(parts.sum(0), exact(x, weight))


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("kernel", ["few", "many"])
def test_linear(
    impl: Implementation, dtype: torch.dtype, rows: int, outputs: int, width: int, kernel: str
) -> None:
    x, weight = fp8_rows(rows, width, impl.device), fp8_weight(outputs, width, impl.device)
    bias = normal(outputs, dtype=dtype, device=impl.device, seed=3)
    residual = normal(rows, outputs, dtype=dtype, device=impl.device, seed=4)
    tiles = SMALL if kernel == "few" else LARGE_TILES
    y = impl(int8_linear)(x, weight, dtype, bias, residual, tiles=tiles)
    assert y.dtype == dtype
    assert_product(y, exact(x, weight) + bias.double().cpu() + residual.double().cpu())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("group", [0, 48])
@pytest.mark.parametrize(
    "tiles", [{"EXACT": 32}, {"TMA": 1}, {"PIECES": 2, "MORE_N": 16}, {"TOGETHER": 2, "PROGRAMS": 0}]
)
def test_tiles_of_many_rows(impl: Implementation, group: int, tiles: dict[str, int]) -> None:
    x, weight = fp8_rows(130, 96, impl.device, group), fp8_weight(70, 96, impl.device)
    if group and "MORE_N" in tiles:
        pytest.skip("groups have one width")
    y = int8_matmul_triton(x, weight, torch.float32, tiles=LARGE_TILES | tiles)
    assert_product(y, exact(x, weight))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_row_has_the_same_bits_beside_any_others(impl: Implementation) -> None:
    x, weight = fp8_rows(70, 256, impl.device), fp8_weight(48, 256, impl.device)
    if impl.device == "cpu" and impl is IMPLEMENTATIONS[0]:
        pytest.skip("PyTorch's order depends on the rows: the scheme takes them one by one")
    together = impl(int8_linear)(x, weight, torch.float16, tiles=INVARIANT_FP8_TILES)
    for row in (0, 33, 69):
        alone = Int8Rows(x.values[row : row + 1], x.scales[row : row + 1])
        y = impl(int8_linear)(alone, weight, torch.float16, tiles=INVARIANT_FP8_TILES)
        assert torch.equal(y[0], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [65, 70, 257, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_library_sums_exactly_enough(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    """Of a down product's width; within the rounding of the result."""
    x, weight = fp8_rows(rows, 14336, "cuda"), fp8_weight(4096, 14336, "cuda")
    bias = normal(4096, dtype=dtype, device="cuda", seed=3) if with_bias else None
    assert library_takes(x, weight, dtype, bias)
    y = int8_linear(x, weight, dtype, bias)
    expected = exact(x, weight) + (0 if bias is None else bias.double().cpu())
    error = (y.double().cpu() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < 0.5 * torch.finfo(dtype).eps
    apart = int8_linear(x, weight, dtype, bias, tiles={"EXACT": 128})
    assert_product(apart, expected)


def test_what_the_library_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_library, "_has_product", lambda device: True)
    x, weight = fp8_rows(65, 64), fp8_weight(32, 64)
    assert library_takes(x, weight, torch.bfloat16)
    half = torch.zeros(32, dtype=torch.bfloat16)
    assert library_takes(x, weight, torch.bfloat16, half)
    assert not library_takes(x, weight, torch.float32)
    assert not library_takes(x, weight, torch.bfloat16, half.float())
    assert not library_takes(fp8_rows(64, 64), weight, torch.bfloat16)
    assert not library_takes(fp8_rows(65, 64, group=16), weight, torch.bfloat16)
    assert not library_takes(fp8_rows(65, 40), fp8_weight(32, 40), torch.bfloat16)
    assert not library_takes(x, fp8_weight(33, 64), torch.bfloat16)
    assert not library_takes(int8_rows(65, 64), int8_weight(32, 64), torch.bfloat16)


def fp8_blocks(outputs: int, width: int, device: str = "cpu") -> Int8Weight:
    """A weight with a scale per block."""
    scales = 1 + torch.rand(-(-outputs // 128), width // 128, device=device)
    return Int8Weight(fp8_weight(outputs, width, device).values, scales / width**0.5)


def exact_blocks(x: Int8Rows, weight: Int8Weight) -> torch.Tensor:
    """fp64 [M, N] of rows in groups and a weight in blocks."""
    beside = torch.kron(weight.scales.double().cpu(), torch.ones(128, 128))[: len(weight.values)]
    wide = plain(x.values) * x.scales.double().cpu().repeat_interleave(128, 1)
    return wide @ (plain(weight.values) * beside).T


def test_what_the_library_takes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_library, "_has_product", lambda device: True)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    x, weight = fp8_rows(65, 512, group=128), fp8_blocks(256, 512)
    assert library_takes(x, weight, torch.bfloat16)
    assert not library_takes(x, weight, torch.float32)
    assert not library_takes(fp8_rows(64, 512, group=128), weight, torch.bfloat16)
    assert not library_takes(fp8_rows(65, 512, group=64), weight, torch.bfloat16)
    assert not library_takes(fp8_rows(65, 512), weight, torch.bfloat16)
    assert not library_takes(fp8_rows(65, 256, group=128), fp8_blocks(256, 256), torch.bfloat16)
    assert not library_takes(x, fp8_blocks(200, 512), torch.bfloat16)
    apart = Int8Weight(weight.values, weight.scales.t().contiguous().t())
    assert not library_takes(x, apart, torch.bfloat16)
    for version, cuda in (("2.7.1", "12.9"), ("2.8.0", "12.8"), ("2.8.0", None)):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert not library_takes(x, weight, torch.bfloat16)
        assert library_takes(fp8_rows(65, 512), fp8_weight(256, 512), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 68, 70, 1000])
@pytest.mark.parametrize("shape", [(512, 512), (272, 12288)])
def test_the_library_multiplies_in_blocks(rows: int, shape: tuple[int, int]) -> None:
    x, weight = fp8_rows(rows, shape[1], "cuda", 128), fp8_blocks(*shape, "cuda")
    if not library_takes(x, weight, torch.bfloat16):
        pytest.skip("this PyTorch does not multiply in blocks")
    y, expected = int8_linear(x, weight, torch.bfloat16), exact_blocks(x, weight)
    error = (y.double().cpu() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < 0.5 * torch.finfo(torch.bfloat16).eps
    assert_product(int8_linear(x, weight, torch.bfloat16, tiles={"EXACT": 128}), expected)


def test_zero_rows_and_no_rows() -> None:
    weight = fp8_weight(20, 64)
    none = fp8_rows(1, 64)
    empty = Int8Rows(none.values[:0], none.scales[:0])
    assert launched(int8_linear)(empty, weight, torch.float16).shape == (0, 20)
    zero = quantize_rows(torch.zeros(2, 64), dtype=E4M3)
    assert not launched(int8_linear)(zero, weight, torch.float16).any()


def test_sums_do_not_saturate() -> None:
    """Products of the largest values, 448 times 448, many times over, are far beyond e4m3 and fp16."""
    x = quantize_rows(torch.ones(2, 4096), dtype=E4M3)
    weight = Int8Weight(x.values.clone(), torch.full((2,), 1 / 448))
    y = launched(int8_linear)(x, weight, torch.float32)
    torch.testing.assert_close(y, torch.full((2, 2), 4096.0), rtol=1e-5, atol=0)


def test_both_sides_are_of_one_dtype() -> None:
    for x, weight in ((fp8_rows(2, 64), int8_weight(8, 64)), (int8_rows(2, 64), fp8_weight(8, 64))):
        with pytest.raises(IngotError, match="weight has the wrong dtype"):
            int8_linear(x, weight, torch.float16)


def test_the_library_does_not_keep_sums_in_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **values: given.update(values) or torch.ones(1))
    rows = Int8Rows(torch.zeros(80, 64).to(E4M3), torch.ones(80))
    fp8_library.library_linear(rows, Int8Weight(torch.zeros(32, 64).to(E4M3), torch.ones(32)), torch.bfloat16)
    assert given["use_fast_accum"] is False


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 200, 256), (5, 384, 384), (70, 300, 256)])
def test_in_blocks(impl: Implementation, shape: tuple[int, int, int]) -> None:
    """Whole sums and parts of a weight with a scale per 128 x 128, the last rows' blocks not full."""
    rows, outputs, width = shape
    x = fp8_rows(rows, width, impl.device, 128)
    weight = fp8_blocks(outputs, width, impl.device)
    expected = exact_blocks(x, weight)
    assert_product(impl(int8_linear)(x, weight, torch.float32), expected)
    assert_product(impl(int8_linear_parts)(x, weight).sum(0), expected)


@pytest.mark.parametrize("rows", [65, 68, 71, 72])
def test_the_library_is_given_whole_eights_of_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Scales in the layouts that it demands, zeros beyond the last row, and no result of these."""
    given: dict[str, Any] = {}

    def product(values: torch.Tensor, columns: torch.Tensor, **others: Any) -> torch.Tensor:
        given.update(others | {"values": values})
        scales = others["scale_a"].repeat_interleave(128, 1), others["scale_b"].t()
        wide = plain(values) * scales[0].double()
        beside = torch.kron(scales[1].double(), torch.ones(128, 128))
        return (wide @ (plain(columns.t()) * beside).T).to(others["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", product)
    x, weight = fp8_rows(rows, 512, group=128), fp8_blocks(256, 512)
    y = fp8_library.library_linear(x, weight, torch.bfloat16)
    assert y.shape == (rows, 256)
    assert_product(y, exact_blocks(x, weight))
    assert given["values"].shape == (72, 512)
    assert given["scale_a"].stride() == (1, 72)
    assert given["scale_b"].stride() == (1, 4)
    assert not given["scale_a"][rows:].any()


def test_a_weight_in_blocks_needs_rows_in_groups() -> None:
    weight = Int8Weight(fp8_weight(128, 256).values, torch.ones(1, 2))
    for x in (fp8_rows(2, 256), fp8_rows(2, 256, group=64)):
        with pytest.raises(IngotError, match="in blocks"):
            int8_linear(x, weight, torch.float32)
    with pytest.raises(IngotError, match="scales"):
        int8_linear(fp8_rows(2, 256, group=128), Int8Weight(weight.values, torch.ones(2, 2)), torch.float32)
