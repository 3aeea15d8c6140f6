"""Bytes of a cache in kernels: widened, in every place of a register, and multiplied by queries exactly.

The assembly is read and carried out here.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ingot.kernels.cache import int8_cache_values as narrow
from ingot.kernels.cache.int8_cache_values import query_words, widened, word_products, word_values
from tests.kernels.carried_out import carried_out
from tests.kernels.numerics import normal

TEXTS = {
    torch.float16: (narrow._HALVES, 2),
    torch.bfloat16: (narrow._BRAINS, 2),
    torch.float32: (narrow._FLOATS, 4),
}
ROWS, TOKENS, WIDTH = 4, 8, 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
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
@pytest.mark.parametrize("device", DEVICES)
def test_in_a_kernel(dtype: torch.dtype, device: str, kind: torch.dtype, order: bool) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernel itself runs here")
    numbers = BYTES.view(kind)
    numbers = torch.where(numbers.float().isnan(), 0.0, numbers.float()).to(kind)
    y = torch.full((256,), torch.nan, dtype=dtype, device=device)
    copy_kernel[(1,)](numbers.to(device), y, SIZE=256, ASM=device == "cuda", ORDER=order)
    assert torch.equal(y.float().cpu(), numbers.float())


@triton.jit
def words_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    number_ptr: tl.tensor,
    step_ptr: tl.tensor,
    score_ptr: tl.tensor,
    wide_ptr: tl.tensor,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """Of TOKENS keys a row: the query's numbers, its exact products with the keys, the keys as numbers."""
    rows, cols, words = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH // 4)
    q = tl.load(q_ptr + rows[:, None] * WIDTH + cols[None, :])
    high, low, step = query_words(q)
    tl.store(step_ptr + rows, step)
    for place in tl.static_range(4):
        number = ((high << (24 - 8 * place)) >> 24) * 128 + ((low << (24 - 8 * place)) >> 24)
        tl.store(number_ptr + rows[:, None] * WIDTH + words[None, :] * 4 + place, number)
    tokens = tl.arange(0, TOKENS)[:, None, None] * ROWS + rows[None, :, None]
    keys = tl.load(key_ptr + tokens * (WIDTH // 4) + words[None, None, :])
    sums = tl.sum(word_products(high[None, :, :], low[None, :, :], keys, ASM), axis=2)
    tl.store(score_ptr + tl.arange(0, TOKENS)[:, None] * ROWS + rows[None, :], sums)
    tl.store(wide_ptr + tokens * WIDTH + cols[None, None, :], word_values(keys, ASM))


def run(q: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Numbers [ROWS, WIDTH], steps [ROWS], sums [TOKENS, ROWS], keys [TOKENS, ROWS, WIDTH], on the CPU."""
    shapes = ((ROWS, WIDTH), (ROWS,), (TOKENS, ROWS), (TOKENS, ROWS, WIDTH))
    kinds = (torch.int32, torch.float32, torch.int32, torch.float32)
    out = [torch.full(s, 77, dtype=k, device=q.device) for s, k in zip(shapes, kinds, strict=True)]
    asm = q.device.type == "cuda"
    words_kernel[(1,)](q, keys.view(torch.int32), *out, ROWS=ROWS, TOKENS=TOKENS, WIDTH=WIDTH, ASM=asm)
    return tuple(t.cpu() for t in out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 6e4])
def test_exact_products_of_near_queries(device: str, size: float) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernel itself runs here")
    q = normal(ROWS, WIDTH, dtype=torch.float32) * size
    q[1], q[2, :5] = 0, torch.tensor([size, -size, 8.1 * size, -8.1 * size, 0.0])
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(-128, 128, (TOKENS, ROWS, WIDTH), dtype=torch.int8, generator=generator)
    keys[0], keys[1] = -128, 127
    numbers, steps, sums, wide = run(q.to(device), keys.to(device))
    assert numbers.abs().max() <= 127 * 128
    assert (numbers[1] == 0).all()
    near = (numbers.double() * steps[:, None].double() - q.double()).abs()
    assert (near <= steps[:, None].double() * 0.501).all()
    assert (steps <= q.abs().amax(dim=1) / 16255 + 1e-30).all()
    assert torch.equal(sums.long(), (keys.long() * numbers.long()).sum(dim=2))
    assert torch.equal(wide, keys.float())


@pytest.mark.parametrize("low", [0, 63, -64])
@pytest.mark.parametrize("high", [0, 127, -127, 5])
def test_the_assembly_of_products(high: int, low: int) -> None:
    keys = torch.tensor([-128, 127, -1, 0], dtype=torch.int8)
    words = [torch.full((4,), b, dtype=torch.int8).view(torch.int32).item() & 0xFFFFFFFF for b in (high, low)]
    registers = {"$1": words[0], "$2": words[1], "$3": int(keys.view(torch.int32).item()) & 0xFFFFFFFF}
    found = carried_out(narrow._PRODUCTS.value, registers)["$0"]
    expected = int(keys.long().sum()) * (128 * high + low)
    assert found == expected & 0xFFFFFFFF
