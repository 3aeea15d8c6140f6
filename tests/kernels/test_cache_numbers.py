"""The assembly that makes bytes wide, read and carried out here: all bytes, in every place of a register."""

from __future__ import annotations

import re
import struct

import pytest
import torch
import triton
import triton.language as tl

from ingot.kernels import cache_numbers
from ingot.kernels.cache_numbers import widened

TEXTS = {
    torch.float16: (cache_numbers._HALVES, 2),
    torch.bfloat16: (cache_numbers._BRAINS, 2),
    torch.float32: (cache_numbers._FLOATS, 4),
}
BYTES = torch.arange(-128, 128).to(torch.int8)


def number(text: str, registers: dict[str, int]) -> int:
    """An operand: a register, or a constant in one of PTX's two notations."""
    if text in registers:
        return registers[text]
    return int(text[2:], 16)


def carried_out(text: str, registers: dict[str, int]) -> dict[str, int]:
    """The few instructions that stand there, on 32-bit registers."""
    for line in text.strip("{} ").split(";"):
        words = re.split(r"[ ,]+", line.strip())
        if not words[0] or words[0] == ".reg":
            continue
        operands = [number(word, registers) for word in words[2:]]
        registers[words[1]] = instruction(words[0], operands)
    return registers


def instruction(name: str, operands: list[int]) -> int:
    if name == "xor.b32":
        return operands[0] ^ operands[1]
    if name == "mov.b32":
        return operands[0]
    if name == "prmt.b32":
        pool = struct.pack("<II", *operands[:2])
        return int.from_bytes(bytes(pool[operands[2] >> 4 * i & 7] for i in range(4)), "little")
    sources = [struct.pack("<I", operand) for operand in operands]
    if name == "sub.f32":
        (a,), (b,) = (struct.unpack("<f", source) for source in sources)
        return int.from_bytes(struct.pack("<f", a - b), "little")
    if name == "sub.f16x2":
        pairs = zip(*(struct.unpack("<ee", source) for source in sources), strict=True)
        return int.from_bytes(struct.pack("<ee", *(a - b for a, b in pairs)), "little")
    assert name == "cvt.rn.bf16x2.f32", name
    high, low = (struct.unpack("<f", source)[0] for source in sources)
    pair = torch.tensor([low, high]).bfloat16().view(torch.int16)
    return int(pair[0]) & 0xFFFF | (int(pair[1]) & 0xFFFF) << 16


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
