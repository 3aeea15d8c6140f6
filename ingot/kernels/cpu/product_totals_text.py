"""The text of a product's totals: a group's sums times its scales, less zeros; then what is stored."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.kernels.cpu.lane_text import WHOLE, F, LaneText, same
from ingot.kernels.cpu.panel_packing import LANES, PanelPacking


def kind_of_totals(packing: PanelPacking) -> str:
    return WHOLE if packing.rounds and not packing.by_group else F


def _group_place(
    text: LaneText, places: Mapping[str, str], own: int, size: int, name: str, group: str
) -> str:
    """Where a group's values of a block are, in [groups, N]."""
    row = text.let(f"mul i64 {group}, {places['blocks']}")
    number = text.let(f"add i64 {text.let(f'add i64 {row}, %block')}, {own}")
    return text.at(places[name], text.let(f"mul i64 {number}, {size * LANES}"))


def _weight_group(text: LaneText, places: Mapping[str, str]) -> str:
    """The weight's group: ``fine`` of the rows' are one of its."""
    return text.let(f"udiv i64 %g, {places['fine']}")


def group_zeros(text: LaneText, packing: PanelPacking, places: Mapping[str, str], blocks: int) -> list[str]:
    """A vector per block: int32 with ``rounds``, else fp32, less the middle; none where there are none."""
    if not packing.zeros:
        return []
    found = []
    for own in range(blocks):
        place = _group_place(text, places, own, 1, "zeros", _weight_group(text, places))
        zero = text.let(f"zext <16 x i8> {text.load('<16 x i8>', place, 1)} to {WHOLE}")
        if not packing.rounds:
            middle = same(8 if packing.values == "int4" else 128, "i32")
            zero = text.let(f"sitofp {WHOLE} {text.let(f'sub {WHOLE} {zero}, {middle}')} to {F}")
        found.append(zero)
    return found


def scale_group(
    text: LaneText, packing: PanelPacking, rows: int, blocks: int, places: Mapping[str, str], zeros: list[str]
) -> None:
    """Add a group's sums to the totals."""
    if packing.rounds:
        scaled = _scale_split if packing.split else _scale_integers
        scaled(text, packing, rows, blocks, places, zeros)
        return
    for b in range(blocks):
        scale = text.load(F, _group_place(text, places, b, 4, "scales", "%g"))
        for m in range(rows):
            text.add(
                f"  %nt{m}_{b} = call {F} @llvm.fma.v16f32({F} %na{m}_{b}_0, {F} {scale}, {F} %t{m}_{b})"
            )


def _scale_integers(
    text: LaneText, packing: PanelPacking, rows: int, blocks: int, places: Mapping[str, str], zeros: list[str]
) -> None:
    """Sums less zeros, times inner scales: exact. ``sums`` and ``row_scales`` are [panels, groups, rows]."""
    group = text.let(f"add i64 {text.let('mul i64 %panel, ' + places['groups'])}, %g")
    offset = text.let(f"mul i64 {group}, {4 * rows}")
    for m in range(rows):
        own = text.let(f"add i64 {offset}, {4 * m}")
        total = text.splat(text.load("i32", text.at(places["sums"], own)), "i32")
        scale = None
        if packing.by_group:
            scale = text.splat(text.load("float", text.at(places["row_scales"], own)), "float")
        for b in range(blocks):
            zero = zeros[b] if zeros else same(128, "i32")
            less = text.let(f"sub {WHOLE} %na{m}_{b}_0, {text.let(f'mul {WHOLE} {zero}, {total}')}")
            if packing.values == "int4":
                place = _group_place(text, places, b, 1, "inner", _weight_group(text, places))
                inner = text.let(f"zext <16 x i8> {text.load('<16 x i8>', place, 1)} to {WHOLE}")
                less = text.let(f"mul {WHOLE} {inner}, {less}")
            if scale is None:
                text.add(f"  %nt{m}_{b} = add {WHOLE} %t{m}_{b}, {less}")
            else:
                part = text.let(f"fmul {F} {text.let(f'sitofp {WHOLE} {less} to {F}')}, {scale}")
                text.add(f"  %nt{m}_{b} = fadd {F} %t{m}_{b}, {part}")


def _scale_split(
    text: LaneText, packing: PanelPacking, rows: int, blocks: int, places: Mapping[str, str], zeros: list[str]
) -> None:
    """The higher parts together and the lowest, each less zeros: exact. Then fp32, by both scales."""
    group = text.let(f"add i64 {text.let('mul i64 %panel, ' + places['groups'])}, %g")
    offset = text.let(f"mul i64 {group}, {4 * rows}")
    sums = text.at(places["sums"], text.let(f"mul i64 {offset}, 2"))
    middle = same(8 if packing.values == "int4" else 128, "i32")
    scales = [
        text.load(F, _group_place(text, places, b, 4, "scales", _weight_group(text, places)))
        for b in range(blocks)
    ]
    for m in range(rows):
        totals = [text.splat(text.load("i32", text.at(sums, str(8 * m + 4 * own))), "i32") for own in (0, 1)]
        own = text.let(f"add i64 {offset}, {4 * m}")
        scale = text.splat(text.load("float", text.at(places["row_scales"], own)), "float")
        for b in range(blocks):
            high = text.let(f"shl {WHOLE} %na{m}_{b}_2, " + same(8, "i32"))
            found = []
            for value, total in zip(
                (text.let(f"add {WHOLE} {high}, %na{m}_{b}_1"), f"%na{m}_{b}_0"), totals, strict=True
            ):
                zero = text.let(f"mul {WHOLE} {zeros[b] if zeros else middle}, {total}")
                found.append(text.let(f"sitofp {WHOLE} {text.let(f'sub {WHOLE} {value}, {zero}')} to {F}"))
            whole = f"{F} {found[0]}, {F} {same(256.0, 'float')}, {F} {found[1]}"
            part = text.let(f"fmul {F} {text.let(f'call {F} @llvm.fma.v16f32({whole})')}, {scale}")
            total = f"{F} {part}, {F} {scales[b]}, {F} %t{m}_{b}"
            text.add(f"  %nt{m}_{b} = call {F} @llvm.fma.v16f32({total})")


def store_totals(
    text: LaneText, packing: PanelPacking, rows: int, blocks: int, places: Mapping[str, str]
) -> None:
    """Totals with scales, plus bias, plus the residual where there is one, to y [panels · rows, N]."""
    width = text.let(f"mul i64 {places['blocks']}, {4 * LANES}")
    first = text.let(f"mul i64 %panel, {rows}")
    column = text.let(f"mul i64 %block, {4 * LANES}")
    biases = [
        text.load(F, text.at(places["bias"], text.let(f"add i64 {column}, {64 * b}"))) for b in range(blocks)
    ]
    scales = [""] * blocks
    if packing.rounds and not packing.split:
        scales = [
            text.load(F, text.at(places["scales"], text.let(f"add i64 {column}, {64 * b}")))
            for b in range(blocks)
        ]
    finals = {}
    offsets = {}
    for m in range(rows):
        row = text.let(f"add i64 {first}, {m}")
        start = text.let(f"add i64 {text.let(f'mul i64 {row}, {width}')}, {column}")
        for b in range(blocks):
            value = f"%nt{m}_{b}"
            if packing.rounds and not packing.split:
                if not packing.by_group:
                    place = text.at(places["row_scales"], text.let(f"mul i64 {row}, 4"))
                    one = text.splat(text.load("float", place), "float")
                    value = text.let(f"fmul {F} {text.let(f'sitofp {WHOLE} {value} to {F}')}, {one}")
                value = text.let(f"fmul {F} {value}, {scales[b]}")
            finals[m, b] = text.let(f"fadd {F} {value}, {biases[b]}")
            offsets[m, b] = text.let(f"add i64 {start}, {64 * b}")
    text.add(f"  %has = icmp ne ptr {places['residual']}, null")
    text.add("  br i1 %has, label %added, label %plain\nadded:")
    for key, value in finals.items():
        old = text.load(F, text.at(places["residual"], offsets[key]))
        value = text.let(f"fadd {F} {old}, {value}")
        text.add(f"  store {F} {value}, ptr {text.at(places['y'], offsets[key])}, align 4")
    text.add("  br label %out\nplain:")
    for key, value in finals.items():
        text.add(f"  store {F} {value}, ptr {text.at(places['y'], offsets[key])}, align 4")
    text.add("  br label %out\nout:")
