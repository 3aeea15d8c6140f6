"""The kernel that widens a weight, against its twin to the bit."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.weight.dequantize import dequantize
from ingot.kernels.weight.stored_weight import StoredWeight, dequantized
from tests.kernels.numerics import DTYPES, launched
from tests.kernels.test_stored_weight import FORMS, random_weight


@pytest.mark.grid(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_the_reference(form: tuple[int, int, bool], dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for outputs, width in ((70, 300), (3, 33)):
        weight = random_weight(form, outputs, width, dtype, device)
        assert torch.equal(launched(dequantize)(weight, dtype), dequantized(weight, dtype))
        assert torch.equal(dequantize(weight, dtype), dequantized(weight, dtype))


def test_what_it_takes() -> None:
    dense = torch.ones(2, 3)
    assert dequantize(StoredWeight(dense, 3), torch.float32) is dense
    with pytest.raises(IngotError, match="scales has the wrong dtype"):
        dequantize(random_weight((8, 0, False), 4, 64, torch.float16, "cpu"), torch.bfloat16)
    with pytest.raises(IngotError, match="a dense weight keeps its dtype"):
        dequantize(StoredWeight(dense, 3), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_7b_shapes(form: tuple[int, int, bool], dtype: torch.dtype) -> None:
    for outputs, width in ((22016, 4096), (4096, 11008)):
        weight = random_weight(form, outputs, width, dtype, "cuda")
        assert torch.equal(launched(dequantize)(weight, dtype), dequantized(weight, dtype))
