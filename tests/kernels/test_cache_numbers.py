"""The assembly that makes bytes wide, read and carried out here: all bytes, in every place of a register."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ingot.kernels.cache import cache_numbers
from ingot.kernels.cache.cache_numbers import widened
from tests.kernels.carried_out import carried_out

TEXTS = {
    torch.float16: (cache_numbers._HALVES, 2),
    torch.bfloat16: (cache_numbers._BRAINS, 2),
    torch.float32: (cache_numbers.FOUR_FLOATS, 4),
}
BYTES = torch.arange(-128, 128).to(torch.int8)


@pytest.mark.parametrize("dtype", TEXTS)
@pytest.mark.parametrize("turn", range(4))
def test_every_byte_in_every_place(dtype: torch.dtype, turn: int) -> None:
    text, outputs = TEXTS[dtype]
    found = []
    for word in BYTES.roll(turn).view(torch.int32).tolist():
        registers = carried_out(text.value, {f"${outputs}": word & 0xFFFFFFFF})
        found += [registers[f"${i}"] for i in range(outputs)]
    wide = torch.tensor(found, dtype=torch.int64).to(torch.uint32).view(dtype)
    assert torch.equal(wide.float(), BYTES.roll(turn).float())


@triton.jit
def copy_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, SIZE: tl.constexpr, ASM: tl.constexpr, ORDER: tl.constexpr
) -> None:
    places = tl.arange(0, SIZE)
    tl.store(y_ptr + places, widened(tl.load(x_ptr + places), y_ptr.dtype.element_ty, ASM, ORDER))


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", TEXTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_a_kernel(dtype: torch.dtype, device: str, kind: torch.dtype, order: bool) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernel itself runs here")
    numbers = BYTES.view(kind)
    numbers = torch.where(numbers.float().isnan(), 0.0, numbers.float()).to(kind)
    y = torch.full((256,), torch.nan, dtype=dtype, device=device)
    copy_kernel[(1,)](numbers.to(device), y, SIZE=256, ASM=device == "cuda", ORDER=order)
    assert torch.equal(y.float().cpu(), numbers.float())
