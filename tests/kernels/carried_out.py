"""PTX instructions of one thread, carried out in Python: those that the inline assembly here consists of.

registers = carried_out("{ xor.b32 $0, $1, 0x80808080; }", {"$1": 5})
"""

from __future__ import annotations

import re
import struct

import torch


def number(text: str, registers: dict[str, int]) -> int:
    """An operand: a register, or a constant in one of PTX's three notations."""
    if text in registers:
        return registers[text]
    return int(text) if text.isdigit() else int(text[2:], 16)


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
    """The register that one instruction leaves."""
    if name == "xor.b32":
        return operands[0] ^ operands[1]
    if name == "mov.b32":
        return operands[0]
    if name == "shl.b32":
        return operands[0] << operands[1] & 0xFFFFFFFF
    if name == "dp4a.s32.s32":
        left, right = (struct.unpack("<4b", struct.pack("<I", operand)) for operand in operands[:2])
        return operands[2] + sum(a * b for a, b in zip(left, right, strict=True)) & 0xFFFFFFFF
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
