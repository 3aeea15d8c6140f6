"""The text of a product's inner loop: a step of 8 columns, added to the sums of a tile."""

from __future__ import annotations

from collections.abc import Iterator

from ingot.kernels.cpu.lane_text import WHOLE, F, LaneText, same
from ingot.kernels.cpu.panel_packing import STEP, STEP_BYTES, PanelPacking


def float_step(
    text: LaneText,
    packing: PanelPacking,
    rows: int,
    x: str,
    weights: list[str],
    zeros: list[str],
    permutes: bool,
) -> dict[tuple[int, int, int], str]:
    sums = {(m, b, 0): f"%a{m}_{b}_0" for m in range(rows) for b in range(len(weights))}
    values = [_widened(text, packing, weight, permutes) for weight in weights]
    for column in range(STEP):
        wide = [next(of) for of in values]
        if zeros:
            wide = [text.let(f"fsub {F} {w}, {z}") for w, z in zip(wide, zeros, strict=True)]
        for m in range(rows):
            one = text.splat(text.load("float", text.at(x, str(4 * (column * rows + m)))), "float")
            for b, w in enumerate(wide):
                total = f"{F} {one}, {F} {w}, {F} {sums[m, b, 0]}"
                sums[m, b, 0] = text.let(f"call {F} @llvm.fma.v16f32({total})")
    return sums


def _widened(text: LaneText, packing: PanelPacking, weight: str, permutes: bool) -> Iterator[str]:
    """The columns of a step of a block, one after another, as floats."""
    if packing.values == "int4":
        words = text.load(WHOLE, weight)
        for column in range(STEP):
            yield _nibble(text, words, column, permutes)
        return
    width = STEP_BYTES[packing.values] // STEP
    for column in range(STEP):
        place = text.at(weight, str(width * column))
        if packing.values == "bf16":
            wide = text.let(f"zext <16 x i16> {text.load('<16 x i16>', place, 2)} to {WHOLE}")
            yield text.let(f"bitcast {WHOLE} {text.let(f'shl {WHOLE} {wide}, ' + same(16, 'i32'))} to {F}")
        elif packing.values == "fp16":
            yield text.let(f"fpext <16 x half> {text.load('<16 x half>', place, 2)} to {F}")
        else:
            wide = text.let(f"sext <16 x i8> {text.load('<16 x i8>', place, 1)} to {WHOLE}")
            yield text.let(f"sitofp {WHOLE} {wide} to {F}")


def _nibble(text: LaneText, words: str, column: int, permutes: bool) -> str:
    """q - 8 of 16 outputs."""
    shifted = text.let(f"lshr {WHOLE} {words}, " + same(4 * column, "i32")) if column else words
    if permutes:  # the instruction reads the low 4 bits alone
        table = "<" + ", ".join(f"float {number - 8:.1f}" for number in range(16)) + ">"
        return text.let(f"call {F} @llvm.x86.avx512.permvar.sf.512({F} {table}, {WHOLE} {shifted})")
    low = text.let(f"and {WHOLE} {shifted}, " + same(15, "i32"))
    less = text.let(f"sub {WHOLE} {low}, " + same(8, "i32"))
    return text.let(f"sitofp {WHOLE} {less} to {F}")


def integer_step(
    text: LaneText,
    packing: PanelPacking,
    rows: int,
    x: str,
    weights: list[str],
    zeros: list[str],
    permutes: bool,
) -> dict[tuple[int, int, int], str]:
    """By vpdpbusd: four unsigned values of the weight by four of a row, added to the sum."""
    blocks, parts = range(len(weights)), range(packing.parts)
    sums = {(m, b, part): f"%a{m}_{b}_{part}" for m in range(rows) for b in blocks for part in parts}
    fours: list[list[str]] = []
    for weight in weights:
        if packing.values == "int4":
            pair = text.load(WHOLE, weight)
            mask = same(0x0F0F0F0F, "i32")
            high = text.let(f"and {WHOLE} {text.let(f'lshr {WHOLE} {pair}, ' + same(4, 'i32'))}, {mask}")
            fours.append([text.let(f"and {WHOLE} {pair}, {mask}"), high])
        else:
            fours.append([text.load(WHOLE, weight), text.load(WHOLE, text.at(weight, "64"))])
    for half in range(2):
        for m, part in ((m, part) for m in range(rows) for part in parts):
            place = text.at(x, str(4 * ((half * rows + m) * len(parts) + part)))
            one = text.splat(text.load("i32", place, 1), "i32")
            for b in blocks:
                sums[m, b, part] = text.let(
                    f'call {WHOLE} asm "vpdpbusd $2, $1, $0", "=v,v,v,0"'
                    f"({WHOLE} {fours[b][half]}, {WHOLE} {one}, {WHOLE} {sums[m, b, part]})"
                )
    return sums
