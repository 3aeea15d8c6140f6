"""Numbers of 4 bits that become numbers of 8: kernel and twin against plain integers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.product.few_rows import small_int8
from ingot.kernels.product.int8.int8_linear import int8_linear
from ingot.kernels.rows.int8_rows import quantize_rows
from ingot.kernels.weight.expand_int8 import expand_int8
from ingot.kernels.weight.int4_weight import GROUPS, expanded, fits_int8, numbers_of, rows_of
from tests.kernels.int4_case import allowed_pairs, int4_weight
from tests.kernels.numerics import launched, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(70, 300), (3, 33), (1, 128), (129, 640), (32, 1000)]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_exact(outputs: int, width: int, group: int) -> None:
    weight, exact = int4_weight(outputs, width, group, DEVICE)
    for found in (launched(expand_int8)(weight), expand_int8(weight), expanded(weight)):
        assert found.values.dtype == torch.int8
        assert torch.equal(found.values.long(), exact)
        assert found.scales is weight.scales
        assert found.values.stride(0) % 16 == 0  # int8 products read rows of whole lines
    whole = launched(expand_int8)(weight).values.as_strided(
        (outputs, -(-width // group) * group), (-(-width // group) * group, 1)
    )
    assert not whole[:, width:].any()


@pytest.mark.parametrize("tiles", [{"BLOCK_N": 1, "TOGETHER": 1}, {"BLOCK_N": 128, "TOGETHER": 8}])
def test_any_tiles(tiles: dict[str, int]) -> None:
    weight, exact = int4_weight(10, 700, 64, DEVICE)
    assert torch.equal(launched(expand_int8)(weight, tiles).values.long(), exact)


def test_every_step_and_zero_has_all_its_numbers_in_int8() -> None:
    """The claim that lets one int32 sum run over all columns."""
    steps, zeros = allowed_pairs().unbind(1)
    assert fits_int8(steps, zeros)
    assert set(steps.tolist()) == set(range(1, 17))  # each step has a zero that does
    assert not fits_int8(torch.tensor([16]), torch.tensor([7]))  # (15 - 7) · 16 = 128
    assert not fits_int8(torch.tensor([16]), torch.tensor([9]))
    assert not fits_int8(torch.tensor([0]), torch.tensor([0]))


def test_rows_are_rows() -> None:
    weight, exact = int4_weight(20, 200, 64, DEVICE)
    assert torch.equal(expanded(rows_of(weight, 5, 12)).values.long(), exact[5:12])
    assert int(numbers_of(weight).max()) == 15


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_product_s_sums_are_exact(rows: int) -> None:
    """Sums over all columns at once, by int64, then one scale a row and a token."""
    weight, exact = int4_weight(40, 300, 128, DEVICE)
    x = quantize_rows(normal(rows, 300, dtype=torch.float32, device=DEVICE))
    sums = x.values.cpu().long() @ exact.cpu().T
    wanted = sums.double() * x.scales.cpu().double()[:, None] * weight.scales.cpu().double()
    found = int8_linear(x, expand_int8(weight), torch.float32)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-6, atol=0)


def test_a_product_waits_for_the_weight_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few rows ask for constants early; the pass before this one is the one that writes it."""
    weight, _ = int4_weight(64, 256, 128)
    found = expand_int8(weight)
    assert found.temporary
    x = quantize_rows(normal(4, 256, dtype=torch.float32))
    launched = []
    monkeypatch.setattr(small_int8, "_launch", lambda *given: launched.append(given[-1].loop.OVERLAP))
    for one in (found, replace(found, temporary=False)):
        small_int8.small_int8_linear_triton(x, one, torch.float32, tiles={"OVERLAP": 2})
        small_int8.small_int8_parts_triton(x, one, tiles={"OVERLAP": 2})
    assert launched == [1, 1, 2, 2]


def test_what_it_takes() -> None:
    weight, _ = int4_weight(8, 256, 128)
    with pytest.raises(IngotError, match=r"unsupported group size; seen: 32; allowed: .*128, 64"):
        expand_int8(replace(weight, group=32))
    with pytest.raises(IngotError, match="pairs has the wrong shape"):
        expand_int8(replace(weight, in_features=400))
    with pytest.raises(IngotError, match="steps has the wrong dtype"):
        expand_int8(replace(weight, steps=weight.steps.int()))
    with pytest.raises(IngotError, match="zeros has the wrong shape"):
        expand_int8(replace(weight, zeros=weight.zeros.T.contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_7b_shapes(group: int) -> None:
    for outputs, width in ((22016, 4096), (4096, 11008), (12288, 4096)):
        weight, exact = int4_weight(outputs, width, group, "cuda")
        assert torch.equal(expand_int8(weight).values, exact.to(torch.int8))
