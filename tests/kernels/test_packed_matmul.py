"""The product of many rows with weights of 8 and of 4 bits against float64, in every form of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.product_candidates import packed_candidates
from ingot.errors import IngotError
from ingot.kernels.product.packed.packed_matmul import packed_matmul, packed_matmul_parts
from ingot.kernels.rows.operand_rows import operand_rows
from ingot.kernels.tiles import packed_tiles as packed_tiles_module
from ingot.kernels.tiles.packed_tiles import packed_tiles
from ingot.kernels.weight.stored_weight import StoredWeight, dequantized
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation, assert_near, launched, normal
from tests.kernels.test_stored_weight import FORMS, random_weight

HALF_DTYPES = [torch.float16, torch.bfloat16]
# Small tiles, so that a small case has several, and an odd one at each end.
SMALL = {"BLOCK_T": 64, "BLOCK_N": 32, "num_warps": 4}


def expected(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """x W^T in float64, of the numbers as they are multiplied: of groups scaled in the dtype of x."""
    wide = dequantized(weight, x.dtype if weight.group else torch.float64)
    return x.double() @ wide.double().T


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(65, 37, 200), (100, 32, 256)])
def test_equal_to_float64(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], rows: int, outputs: int, width: int
) -> None:
    x = normal(rows, width, dtype=dtype, device=impl.device)
    weight = random_weight(form, outputs, width, dtype, impl.device)
    bias = normal(outputs, dtype=dtype, device=impl.device, seed=3)
    for block_k, splits, wide in ((128, 2, 0), (256, 1, 1), (128, 1, 1), (256, 2, 0)):
        tiles = SMALL | {"BLOCK_K": block_k, "SPLITS": splits, "WIDE": wide}
        y = impl(packed_matmul)(x, weight, bias, tiles)
        assert_near(y, expected(x, weight) + bias.double())


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", [(8, 0, False), (4, 0, True), (4, 128, True)])
@pytest.mark.parametrize("splits", [2, 3, 64])
def test_parts(impl: Implementation, form: tuple[int, int, bool], splits: int) -> None:
    """They add up to the whole, and none is without columns."""
    x = normal(70, 1000, dtype=torch.float16, device=impl.device)
    weight = random_weight(form, 37, 1000, torch.float16, impl.device)
    tiles = SMALL | {"BLOCK_K": 128, "SPLITS": splits}
    parts = impl(packed_matmul_parts)(x, weight, tiles)
    assert parts.dtype == torch.float32
    assert parts.shape[0] in (1, min(splits, 8))
    torch.testing.assert_close(parts.double().sum(0), expected(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [9, 32, 33, 256, 300])
@pytest.mark.parametrize("bits", [8, 4])
def test_default_tiles(impl: Implementation, rows: int, bits: int) -> None:
    form = (8, 0, False) if bits == 8 else (4, 128, True)
    x = normal(rows, 264, dtype=torch.bfloat16, device=impl.device)
    weight = random_weight(form, 100, 264, torch.bfloat16, impl.device)
    assert_near(impl(packed_matmul)(x, weight), expected(x, weight))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("tma", [1, 2, 4])
@pytest.mark.parametrize("wide", [0, 1])
def test_rows_apart(impl: Implementation, tma: int, wide: int) -> None:
    """Rows of x that do not follow each other, by pointers and by a descriptor; none between is read."""
    whole = torch.full((130, 208), float("nan"), dtype=torch.float16, device=impl.device)
    x = whole[::2, :200]
    x.copy_(normal(65, 200, dtype=torch.float16, device=impl.device))
    weight = random_weight((4, 64, True), 40, 200, torch.float16, impl.device)
    y = impl(packed_matmul)(x, weight, tiles=SMALL | {"TMA": tma, "WIDE": wide})
    assert_near(y, expected(x, weight))


def test_odd_width_by_pointers() -> None:
    weight = random_weight((8, 0, False), 20, 201, torch.float16, "cpu")
    x = normal(66, 201, dtype=torch.float16)
    if torch.cuda.is_available():
        pytest.skip("the interpreter's")
    assert_near(launched(packed_matmul)(x, weight, tiles=SMALL | {"TMA": 4}), expected(x, weight))
    with pytest.raises(IngotError, match="cannot be read through a tensor descriptor"):
        launched(packed_matmul)(x, weight, tiles=SMALL | {"TMA": 2})


def test_no_rows() -> None:
    weight = random_weight((8, 0, False), 20, 64, torch.float16, "cpu")
    x = torch.empty(0, 64, dtype=torch.float16)
    assert packed_matmul(x, weight).shape == (0, 20)
    assert launched(packed_matmul)(x, weight).shape == (0, 20)
    assert launched(packed_matmul_parts)(x, weight).shape[1:] == (0, 20)


def test_what_it_takes() -> None:
    weight = random_weight((8, 0, False), 20, 64, torch.float16, "cpu")
    with pytest.raises(IngotError, match="x has the wrong dtype"):
        packed_matmul(torch.ones(70, 64), weight)
    with pytest.raises(IngotError, match="another width"):
        packed_matmul(torch.ones(70, 63).half(), weight)
    with pytest.raises(IngotError, match="the weight is dense"):
        packed_matmul(torch.ones(70, 64).half(), StoredWeight(torch.ones(20, 64).half(), 64))
    with pytest.raises(IngotError, match="bias has the wrong shape"):
        packed_matmul(torch.ones(70, 64).half(), weight, torch.ones(21).half())
    with pytest.raises(IngotError, match="unknown tile choice"):
        launched(packed_matmul)(torch.ones(70, 64).half(), weight, tiles={"BLOCK_M": 64})


def test_candidates_are_apart() -> None:
    weight = random_weight((4, 128, True), 4096, 256, torch.float16, "cpu")
    device = torch.device("cpu")
    for rows in (9, 32, 64, 65, 512):
        found = packed_candidates(rows, weight, device, split=True)
        assert found[0] == packed_tiles(rows, weight, device, split=True, ordered=True)
        assert len({tuple(sorted(tiles.items())) for tiles in found}) == len(found)


def test_sums_of_few_outputs_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parts as programs fit beside each other, by what their registers and shared memory take."""
    monkeypatch.setattr(packed_tiles_module, "_resolved", packed_tiles_module._resolved.__wrapped__)
    monkeypatch.setattr(packed_tiles_module, "multiprocessors", lambda device: 132)
    device = torch.device("cpu")
    cases = (((8, 0, False), [4, 4, 4, 4, 4, 4], [8, 4, 4, 4, 4, 4]),)
    cases += (((4, 128, True), [8, 8, 4, 4, 4, 4], [4, 4, 4, 4, 2, 2]),)
    for form, natural, ordered in cases:
        few, many = (random_weight(form, outputs, 128, torch.float16, "cpu") for outputs in (4096, 16384))
        counts = (32, 64, 65, 128, 129, 256)
        for order, splits in ((False, natural), (True, ordered)):
            found = [packed_tiles(n, few, device, split=True, ordered=order)["SPLITS"] for n in counts]
            assert found == splits
        assert packed_tiles(128, few, device)["SPLITS"] == 1
        assert packed_tiles(256, many, device, split=True)["SPLITS"] == 1


def test_less_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_tiles_module, "_resolved", packed_tiles_module._resolved.__wrapped__)
    monkeypatch.setattr(packed_tiles_module, "shared_bytes", lambda device: 99 << 10)
    weight = random_weight((8, 0, False), 32, 128, torch.float16, "cpu")
    for num_tokens in (9, 64, 256):
        tiles = packed_tiles(num_tokens, weight, torch.device("cpu"))
        rows, outputs, depth = tiles["BLOCK_T"], tiles["BLOCK_N"], tiles["BLOCK_K"]
        assert (rows * 2 + outputs) * depth * (tiles["num_stages"] - 1) <= 99 << 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [9, 16, 32, 64, 65, 100, 256, 300, 512])
def test_7b_shapes(form: tuple[int, int, bool], dtype: torch.dtype, rows: int) -> None:
    for outputs, width in ((4096, 11008), (22016, 4096), (4093, 4000)):
        x = normal(rows, width, dtype=dtype, device="cuda")
        weight = random_weight(form, outputs, width, dtype, "cuda")
        torch.cuda.synchronize()
        assert_near(packed_matmul(x, weight), expected(x, weight))
        parts = packed_matmul_parts(x, weight).double().sum(0)
        torch.testing.assert_close(parts, expected(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 30, 64, 96, 200, 500])
@pytest.mark.parametrize("form", [(8, 0, False), (4, 128, True)])
def test_every_candidate(form: tuple[int, int, bool], rows: int) -> None:
    x = normal(rows, 4096, dtype=torch.float16, device="cuda")
    weight = random_weight(form, 4096, 4096, torch.float16, "cuda")
    torch.cuda.synchronize()
    wanted = expected(x, weight)
    for tiles in packed_candidates(rows, weight, x.device, split=True):
        rows_of = operand_rows(x) if tiles["DIRECT"] else x
        parts = packed_matmul_parts(rows_of, weight, tiles)
        torch.testing.assert_close(parts.double().sum(0), wanted, rtol=1e-4, atol=1e-4, msg=str(tiles))
        assert_near(packed_matmul(rows_of, weight, tiles=tiles), wanted)
