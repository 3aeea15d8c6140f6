"""Rows in the operand's order: where each column stands, what ends in it, and what it is good for."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.activation.gated_mlp import silu_mul_operand
from ingot.kernels.product.packed.packed_matmul import packed_matmul, packed_matmul_parts, takes_operand
from ingot.kernels.rows.operand_rows import OperandRows, operand_rows
from ingot.kernels.weight.stored_weight import StoredWeight
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, launched, normal
from tests.kernels.test_packed_matmul import HALF_DTYPES, expected
from tests.kernels.test_stored_weight import FORMS, random_weight


def columns_of_lanes() -> list[int]:
    """Columns of x by their place in the operand: lane t of four has eight that follow each other, and of
    each 16 columns of the operand holds the pairs from 2 t and from 2 t + 8 on.
    """
    column = [0] * 32
    for lane in range(4):
        held = iter(range(8 * lane, 8 * lane + 8))
        for step in (0, 16):
            for start in (2 * lane, 2 * lane + 8):
                column[step + start], column[step + start + 1] = next(held), next(held)
    return column


def test_the_order_is_the_lanes() -> None:
    x = torch.arange(3 * 96).view(3, 96)
    places = torch.tensor([32 * span + column for span in range(3) for column in columns_of_lanes()])
    assert operand_rows(x).values.equal(x[:, places])
    assert operand_rows(x).natural().equal(x)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [32, 96, 1056])
def test_silu_mul(impl: Implementation, dtype: torch.dtype, hidden: int) -> None:
    gate_up = normal(5, 2 * hidden, dtype=dtype, device=impl.device, seed=5)
    inner = impl(silu_mul_operand)(gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_near(inner.natural(), torch.nn.functional.silu(gate) * up, loosen=2)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(9, 80, 224), (33, 48, 512), (70, 64, 384)])
def test_products(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], rows: int, outputs: int, width: int
) -> None:
    x = normal(rows, width, dtype=dtype, device=impl.device)
    weight = random_weight(form, outputs, width, dtype, impl.device)
    bias = normal(outputs, dtype=dtype, device=impl.device, seed=3)
    for ahead, splits, wide, block_k in ((1, 1, 1, 256), (2, 2, 0, 256), (1, 3, 1, 128), (1, 2, 1, 512)):
        tiles = {"BLOCK_T": 32, "BLOCK_N": 64, "num_warps": 4, "DIRECT": ahead, "SPLITS": splits}
        tiles |= {"WIDE": wide, "BLOCK_K": block_k}
        y = impl(packed_matmul)(operand_rows(x), weight, bias, tiles)
        assert_near(y, expected(x, weight) + bias.double())
        parts = impl(packed_matmul_parts)(operand_rows(x), weight, tiles)
        torch.testing.assert_close(parts.double().sum(0), expected(x, weight), rtol=1e-4, atol=1e-4)


def test_who_takes_it() -> None:
    device = torch.device("cpu")
    weight = random_weight((8, 0, False), 64, 256, torch.float16, "cpu")
    assert takes_operand(9, weight, device)
    for outputs, width in ((40, 256), (64, 240)):
        other = random_weight((8, 0, False), outputs, width, torch.float16, "cpu")
        assert not takes_operand(9, other, device)
    assert not takes_operand(9, StoredWeight(torch.ones(64, 256).half(), 256), device)


def test_refused() -> None:
    weight = random_weight((8, 0, False), 64, 64, torch.float16, "cpu")
    x = torch.ones(9, 64).half()
    odd = random_weight((8, 0, False), 40, 64, torch.float16, "cpu")
    for rows, other, direct in ((operand_rows(x), weight, 0), (x, weight, 1), (operand_rows(x), odd, 1)):
        with pytest.raises(IngotError, match="exactly when x has its columns in the operand's order"):
            launched(packed_matmul)(rows, other, tiles={"DIRECT": direct})
    with pytest.raises(IngotError, match="x has the wrong dtype"):
        packed_matmul(OperandRows(torch.ones(9, 64)), weight)
    with pytest.raises(IngotError, match="whole spans"):
        silu_mul_operand(torch.ones(2, 96))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [9, 16, 32, 64])
def test_7b_shapes(form: tuple[int, int, bool], dtype: torch.dtype, rows: int) -> None:
    for outputs, width in ((4096, 11008), (12288, 4096), (22016, 4096), (4080, 4000)):
        x = normal(rows, width, dtype=dtype, device="cuda")
        weight = random_weight(form, outputs, width, dtype, "cuda")
        torch.cuda.synchronize()
        ordered = operand_rows(x)
        tiles = {} if takes_operand(rows, weight, x.device) else {"DIRECT": 1}
        assert_near(packed_matmul(ordered, weight, tiles=tiles), expected(x, weight))
        tiles = {} if takes_operand(rows, weight, x.device, split=True) else {"DIRECT": 1}
        parts = packed_matmul_parts(ordered, weight, tiles).double().sum(0)
        torch.testing.assert_close(parts, expected(x, weight), rtol=1e-4, atol=1e-4)
