"""The text of rows in int8 for products of packed weights, in LLVM's language.

    values = rint(x · (1 / m · 127)), m the largest magnitude of a row or group # one int8, as int8_rows.py
    values = rint(x · 2^(21 - e)), 2^e ≤ m < 2^(e + 1), of 23 bits              # ``split``: three int8 each

A split value is 65536 · d2 + 256 · d1 + d0 with d in -128 … 127: products of its parts are exact, and it is
within 2^-22 of the group's largest magnitude. Rows lie in panels [columns / 4, rows, parts, 4]; beside them
are the sums of a group's values that a product's zeros are multiplied by, [panels, groups, rows] int32, of a
split one [..., 2]: those of 256 · d2 + d1, and of d0.

    text = rows_text(packing, "rows")         # void rows(args, thread, threads): ``ARGUMENTS`` of a product
"""

from __future__ import annotations

from ingot.kernels.cpu.function_text import Function, constant, float_bits
from ingot.kernels.cpu.panel_packing import ARGUMENTS, NUMBERS, PanelPacking

_V, _I = "<8 x float>", "<8 x i32>"
_LEAST_BITS = 0x2EDBE6FF  # of 1e-10, the least magnitude by which rows are divided
_LEAST_SPLIT_BITS = (127 - 100) << 23  # of 2^-100
MOST_SPLIT = 256  # columns of a split group, whose sums int32 holds
ROWS_DECLARED = (
    "declare i32 @llvm.vector.reduce.umax.v8i32(<8 x i32>)",
    "declare i32 @llvm.vector.reduce.add.v8i32(<8 x i32>)",
    "declare <8 x i32> @llvm.umax.v8i32(<8 x i32>, <8 x i32>)",
    "declare i64 @llvm.smin.i64(i64, i64)",
    "declare i32 @llvm.umax.i32(i32, i32)",
    "declare <8 x float> @llvm.rint.v8f32(<8 x float>)",
    "declare <8 x float> @llvm.maxnum.v8f32(<8 x float>, <8 x float>)",
    "declare <8 x float> @llvm.minnum.v8f32(<8 x float>, <8 x float>)",
)


def rows_text(packing: PanelPacking, name: str) -> str:
    """A function that quantizes rows; each thread takes a share of their groups."""
    f = Function(f"define internal void @{name}(ptr %args, i64 %thread, i64 %threads)")
    words = {
        word: f.word("%args", number, "i64" if word in NUMBERS else "ptr")
        for number, word in enumerate((*ARGUMENTS, "rows"))
    }
    groups, rows = words["groups"], words["rows"]
    size = f.let(f"mul i64 {words['steps']}, 8")
    columns = f.let(f"mul i64 {size}, {groups}")
    last_row = f.let(f"sub i64 {words['count']}, 1")
    inverse, scale = f.variable("float", float_bits(0.0)), f.variable("float", float_bits(0.0))
    scaled = f.variable("i64", "-1")  # the row whose scale these are
    filled = f.let(f"mul i64 {words['panels']}, {rows}")
    first, last = f.part(f.let(f"mul i64 {filled}, {groups}"))
    with f.loop(first, last) as unit:
        row, group = f.let(f"udiv i64 {unit}, {groups}"), f.let(f"urem i64 {unit}, {groups}")
        own = f.let(f"call i64 @llvm.smin.i64(i64 {row}, i64 {last_row})")  # the last one fills a panel up
        start = f.at(words["source"], f.let(f"mul i64 {own}, {columns}"))
        panel, inside = f.let(f"udiv i64 {row}, {rows}"), f.let(f"urem i64 {row}, {rows}")
        source = f.at(start, f.let(f"mul i64 {group}, {size}"))
        beside = f.let(f"add i64 {f.let(f'mul i64 {panel}, {groups}')}, {group}")
        beside = f.let(f"add i64 {f.let(f'mul i64 {beside}, {rows}')}, {inside}")
        if packing.by_group:
            _scale(f, packing, source, size, inverse, scale)
            f.store("float", f.load("float", scale), f.at(words["row_scales"], beside))
        else:
            with f.when(f.let(f"icmp ne i64 {row}, {f.load('i64', scaled)}")):
                f.store("i64", row, scaled)
                _scale(f, packing, start, columns, inverse, scale)
                _static(f, words["static"], inverse, scale)
                f.store("float", f.load("float", scale), f.at(words["row_scales"], row))
        width = 4 * packing.parts
        fours = f.let(f"mul i64 {f.let(f'mul i64 {panel}, {columns}')}, {rows}")
        behind = f.let(f"mul i64 {f.let(f'mul i64 {group}, {size}')}, {rows}")
        target = f.let(f"mul i64 {f.let(f'add i64 {fours}, {behind}')}, {packing.parts}")
        target = f.let(f"add i64 {target}, {f.let(f'mul i64 {inside}, {width}')}")
        x = f.at(words["x"], target, 1)
        sums = _round_group(f, packing, source, size, f.load("float", inverse), x, rows)
        _store_sums(f, sums, f.at(words["sums"], beside, 4 * len(sums)))
    return str(f)


def _scale(f: Function, packing: PanelPacking, source: str, count: str, inverse: str, scale: str) -> None:
    """By the largest bits of a magnitude: those of what is not a number are larger than all others."""
    most = f.variable(_I, "zeroinitializer")
    with f.loop("0", count, 8) as at:
        bits = f.let(f"and {_I} {f.load(_I, f.at(source, at))}, <{', '.join(['i32 2147483647'] * 8)}>")
        f.store(_I, f.let(f"call {_I} @llvm.umax.v8i32({_I} {f.load(_I, most)}, {_I} {bits})"), most)
    bits = f.let(f"call i32 @llvm.vector.reduce.umax.v8i32({_I} {f.load(_I, most)})")
    least = _LEAST_SPLIT_BITS if packing.split else _LEAST_BITS
    bits = f.let(f"call i32 @llvm.umax.i32(i32 {bits}, i32 {least})")
    if not packing.split:
        largest = f.let(f"bitcast i32 {bits} to float")
        one = f.let(f"fdiv float {float_bits(1.0)}, {largest}")  # two roundings, as int8_rows.py has them
        f.store("float", f.let(f"fmul float {one}, {float_bits(127.0)}"), inverse)
        f.store("float", f.let(f"fdiv float {largest}, {float_bits(127.0)}"), scale)
        return
    exponent = f.let(f"lshr i32 {bits}, 23")
    up = f.let(f"shl i32 {f.let(f'sub i32 275, {exponent}')}, 23")
    down = f.let(f"shl i32 {f.let(f'sub i32 {exponent}, 21')}, 23")
    finite = f.let(f"icmp ult i32 {exponent}, 255")
    down = f.let(f"select i1 {finite}, i32 {down}, i32 2143289344")
    f.store("i32", up, inverse)
    f.store("i32", down, scale)


def _static(f: Function, static: str, inverse: str, scale: str) -> None:
    """The scale that calibration found, where there is one."""
    with f.when(f.let(f"icmp ne ptr {static}, null")):
        own = f.load("float", static)
        f.store("float", f.let(f"fdiv float {float_bits(1.0)}, {own}"), inverse)
        f.store("float", own, scale)


def _round_group(
    f: Function, packing: PanelPacking, source: str, count: str, inverse: str, target: str, rows: str
) -> list[str]:
    """Write a group's values; their sums by lane: of all, and with ``split`` of the higher parts."""
    sums = [f.variable(_I, "zeroinitializer") for _ in range(2 if packing.split else 1)]
    many = f.splat(inverse, 8)
    least, most = (-4194304.0, 4194304.0) if packing.split else (-128.0, 127.0)
    stride = f.let(f"mul i64 {rows}, {4 * packing.parts}")
    with f.loop("0", count, 8) as at:
        near = f.let(f"fmul {_V} {f.load(_V, f.at(source, at))}, {many}")
        near = f.let(f"call {_V} @llvm.rint.v8f32({_V} {near})")
        near = f.let(f"call {_V} @llvm.maxnum.v8f32({_V} {near}, {_V} {constant(least, 8)})")
        near = f.let(f"call {_V} @llvm.minnum.v8f32({_V} {near}, {_V} {constant(most, 8)})")
        values = f.let(f"fptosi {_V} {near} to {_I}")
        _add(f, sums[0], values)
        place = f.at(target, f.let(f"mul i64 {f.let(f'udiv i64 {at}, 4')}, {stride}"), 1)
        for part in range(packing.parts):
            _store_fours(f, values, place, stride, 4 * part)
            if part < packing.parts - 1:
                values = f.let(f"ashr {_I} {f.let(f'add {_I} {values}, ' + _same(128))}, {_same(8)}")
            if part == 0 and packing.split:
                _add(f, sums[1], values)
    return sums


def _store_sums(f: Function, sums: list[str], place: str) -> None:
    totals = [f.let(f"call i32 @llvm.vector.reduce.add.v8i32({_I} {f.load(_I, one)})") for one in sums]
    if len(totals) == 2:
        rest = f.let(f"sub i32 {totals[0]}, {f.let(f'shl i32 {totals[1]}, 8')}")
        totals = [totals[1], rest]
    for number, total in enumerate(totals):
        f.store("i32", total, f.at(place, number))


def _same(value: int) -> str:
    return "<" + ", ".join([f"i32 {value}"] * 8) + ">"


def _add(f: Function, place: str, values: str) -> None:
    f.store(_I, f.let(f"add {_I} {f.load(_I, place)}, {values}"), place)


def _store_fours(f: Function, values: str, place: str, stride: str, offset: int) -> None:
    """The low bytes of 8 columns, as two fours."""
    low = f.let(f"bitcast <8 x i8> {f.let(f'trunc {_I} {values} to <8 x i8>')} to <2 x i32>")
    for half in range(2):
        one = f.let(f"extractelement <2 x i32> {low}, i64 {half}")
        own = f.at(place, stride, 1) if half else place
        f.store("i32", one, f.at(own, offset, 1))
