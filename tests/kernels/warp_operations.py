"""PTX of the kind that streaming products embed, carried out for 32 lanes: 32-bit words as numpy arrays.

sums = carried_out(text, [*words, *x, *acc])      # $4 on; returns $0 to $3
"""

from __future__ import annotations

import re

import numpy as np

Lanes = np.ndarray  # [32] uint32


def brain(pairs: Lanes) -> np.ndarray:
    """The two bf16 values of every word, [32, 2] fp64, the lower half first."""
    both = np.stack([pairs << np.uint32(16), pairs & np.uint32(0xFFFF0000)], axis=1)
    return both.view(np.float32).astype(np.float64)


def in_brain(values: np.ndarray) -> Lanes:
    """Values [32, 2] as words; each must be a bf16 value, so that nothing is rounded unseen."""
    bits = values.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    assert (values.astype(np.float32) == values).all()
    return (bits[:, 0] >> np.uint32(16)) | bits[:, 1]


def _lop3(a: Lanes, b: Lanes, c: Lanes, table: int) -> Lanes:
    out = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            bits = [(x if index >> place & 1 else ~x) for x, place in ((a, 2), (b, 1), (c, 0))]
            out |= bits[0] & bits[1] & bits[2]
    return out


def product(a: list[Lanes], b: list[Lanes], c: list[np.ndarray]) -> list[np.ndarray]:
    """mma.m16n8k16 by the PTX manual's fragments, summed in fp64: four values of every lane."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        group, own = divmod(lane, 4)
        for which, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            left[group + row, 2 * own + column : 2 * own + column + 2] = brain(a[which])[lane]
        for which in range(2):
            right[2 * own + 8 * which : 2 * own + 8 * which + 2, group] = brain(b[which])[lane]
    whole = left @ right
    lanes = np.arange(32)
    places = [(lanes // 4 + row, lanes % 4 * 2 + column) for row in (0, 8) for column in (0, 1)]
    return [before + whole[place] for before, place in zip(c, places, strict=True)]


def carried_out(text: str, operands: list[np.ndarray]) -> list[np.ndarray]:
    """What the text leaves in $0 to $3; ``operands`` are $4 and on."""
    kept: dict[str, np.ndarray] = {f"${4 + index}": value for index, value in enumerate(operands)}

    def value(name: str) -> np.ndarray:
        return np.full(32, int(name, 16), np.uint32) if name.startswith("0x") else kept[name]

    for line in text.strip().strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        names = re.findall(r"[\w$]+", rest)
        if name == "mov.b32":
            kept[names[0]] = value(names[1])
        elif name == "shr.b32":
            kept[names[0]] = value(names[1]) >> np.uint32(int(names[2]))
        elif name == "lop3.b32":
            kept[names[0]] = _lop3(*map(value, names[1:4]), int(names[4], 16))
        elif name == "fma.rn.bf16x2":
            x, y, z = (brain(value(one)) for one in names[1:4])
            kept[names[0]] = in_brain(x * y + z)
        elif name.startswith("mma.sync"):
            a, b, c = ([kept[one] for one in part] for part in (names[4:8], names[8:10], names[10:14]))
            for place, total in enumerate(product(a, b, c)):
                kept[f"${place}"] = total
        else:
            assert name in ("", ".reg"), name
    return [kept[f"${place}"] for place in range(4)]
