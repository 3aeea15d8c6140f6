"""The text of products of few rows by packed weights, in LLVM's language.

A weight lies in blocks of 16 outputs: [N / 16, steps, bytes of a step], a step being 8 columns. A tile is
``rows`` by ``blocks`` sums of 16 lanes, one per output, so that no sum is ever split: each output adds its
columns in ascending order, whatever the tile, the other rows and the threads. Rows of several are read as
panels [columns, rows].

    text = product_text(Packing("int4", zeros=True), TILES_OF_AVX512, "kernel", permutes=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

LANES = 16  # outputs of a block
STEP = 8  # columns of a step
Values = Literal["bf16", "fp16", "int8", "int4"]
STEP_BYTES: Mapping[Values, int] = {"bf16": 256, "fp16": 256, "int8": 128, "int4": 64}
ARGUMENTS = (
    "x", "weight", "scales", "zeros", "inner", "bias", "residual", "y",
    "blocks", "panels", "groups", "steps", "sums", "row_scales", "fine", "source", "count", "static",
)  # fmt: skip
NUMBERS = ("blocks", "panels", "groups", "steps", "fine", "count", "rows")  # "rows": behind the arguments
Tiles = Mapping[int, int]  # blocks of a tile by its rows
TILES_OF_AVX512: Tiles = {1: 4, 4: 4, 8: 2}
TILES_OF_OTHERS: Tiles = {1: 2, 4: 1, 8: 1}
SPLIT_TILES: Tiles = {1: 4, 4: 2}


@dataclass(frozen=True)
class Packing:
    """How values lie and what they mean.

    Attributes:
        values: bf16 and fp16 as they are; int8 as q - 128, int4 as q.
        zeros: whether each group has a zero of its own; otherwise 128 or 8.
        rounds: products are of int8 rows, sums are exact: int8 is then q in 0 … 255 with a zero of 128.
        by_group: with ``rounds``: rows have a scale per group of columns.
        split: with ``by_group``: rows have three int8 values per column (rows_text.py), weights a scale per
            group.
    """

    values: Values
    zeros: bool = False
    rounds: bool = False
    by_group: bool = False
    split: bool = False

    @property
    def parts(self) -> int:
        """int8 values per column of a row."""
        return 3 if self.split else 1


F, WHOLE = f"<{LANES} x float>", f"<{LANES} x i32>"


class _Text:
    """Lines of a function, with names for values."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def let(self, expression: str) -> str:
        """A new value."""
        self._count += 1
        self.lines.append(f"  %v{self._count} = {expression}")
        return f"%v{self._count}"

    def add(self, line: str) -> None:
        self.lines.append(line)

    def at(self, base: str, offset: str) -> str:
        """A place so many bytes behind another."""
        return self.let(f"getelementptr i8, ptr {base}, i64 {offset}")

    def splat(self, scalar: str, kind: str) -> str:
        vector = f"<{LANES} x {kind}>"
        one = self.let(f"insertelement {vector} poison, {kind} {scalar}, i64 0")
        return self.let(f"shufflevector {vector} {one}, {vector} poison, <{LANES} x i32> zeroinitializer")

    def load(self, kind: str, place: str, align: int = 4) -> str:
        return self.let(f"load {kind}, ptr {place}, align {align}")


def _same(value: int | float, kind: str) -> str:
    """A constant vector."""
    text = f"{value:.1f}" if kind == "float" else str(value)
    return "<" + ", ".join(f"{kind} {text}" for _ in range(LANES)) + ">"


def product_text(packing: Packing, tiles: Tiles, name: str, *, permutes: bool) -> str:
    """``void NAME(args, thread, threads)``, beside ``PRODUCT_DECLARED``; ``permutes``: AVX-512 finds floats
    of 4 bits in a register.
    """
    functions = [
        _tile(packing, rows, blocks, name, permutes)
        for rows, most in tiles.items()
        for blocks in sorted({1, most})
    ]
    return "\n".join([*functions, _kernel(tiles, name)])


PRODUCT_DECLARED = (
    f"declare {F} @llvm.fma.v16f32({F}, {F}, {F})",
    f"declare {F} @llvm.x86.avx512.permvar.sf.512({F}, {WHOLE})",
    'attributes #0 = { nounwind "min-legal-vector-width"="512" "prefer-vector-width"="512" }',
)


def _kernel(tiles: Tiles, name: str) -> str:
    """A thread's blocks, by the tile of ``rows`` (the last argument)."""
    text = _Text()
    text.add(f"define void @{name}(ptr %args, i64 %thread, i64 %threads) #0 {{\nentry:")
    blocks, panels = (_argument(text, name) for name in ("blocks", "panels"))
    place = text.at("%args", str(8 * len(ARGUMENTS)))
    rows = text.load("i64", place, 8)
    ends = []
    for number in ("%thread", text.let("add i64 %thread, 1")):
        ends.append(text.let(f"udiv i64 {text.let(f'mul i64 {number}, {blocks}')}, %threads"))
    first, last = ends
    cases = " ".join(f"i64 {count}, label %rows{count}" for count in tiles)
    text.add(f"  switch i64 {rows}, label %done [ {cases} ]")
    for count, most in tiles.items():
        text.add(f"""rows{count}:
  br label %wide{count}
wide{count}:
  %b{count} = phi i64 [ {first}, %rows{count} ], [ %nb{count}, %wend{count} ]
  %nb{count} = add i64 %b{count}, {most}
  %fits{count} = icmp ule i64 %nb{count}, {last}
  br i1 %fits{count}, label %wpanel{count}, label %narrow{count}
wpanel{count}:
  %p{count} = phi i64 [ 0, %wide{count} ], [ %np{count}, %wpanel{count} ]
  call void @{name}_{count}_{most}(ptr %args, i64 %b{count}, i64 %p{count})
  %np{count} = add i64 %p{count}, 1
  %more{count} = icmp ult i64 %np{count}, {panels}
  br i1 %more{count}, label %wpanel{count}, label %wend{count}
wend{count}:
  br label %wide{count}
narrow{count}:
  %c{count} = phi i64 [ %b{count}, %wide{count} ], [ %nc{count}, %nend{count} ]
  %some{count} = icmp ult i64 %c{count}, {last}
  br i1 %some{count}, label %npanel{count}, label %done
npanel{count}:
  %q{count} = phi i64 [ 0, %narrow{count} ], [ %nq{count}, %npanel{count} ]
  call void @{name}_{count}_1(ptr %args, i64 %c{count}, i64 %q{count})
  %nq{count} = add i64 %q{count}, 1
  %again{count} = icmp ult i64 %nq{count}, {panels}
  br i1 %again{count}, label %npanel{count}, label %nend{count}
nend{count}:
  %nc{count} = add i64 %c{count}, 1
  br label %narrow{count}""")
    text.add("done:\n  ret void\n}")
    return "\n".join(text.lines)


def _argument(text: _Text, name: str) -> str:
    kind = "i64" if name in NUMBERS else "ptr"
    return text.load(kind, text.at("%args", str(8 * ARGUMENTS.index(name))), 8)


def _tile(packing: Packing, rows: int, blocks: int, name: str, permutes: bool) -> str:
    """``NAME_ROWS_BLOCKS(args, block, panel)``: two loops, of groups and of a group's steps."""
    text = _Text()
    head = f"define internal void @{name}_{rows}_{blocks}(ptr noalias %args, i64 %block, i64 %panel)"
    text.add(f"{head} #0 {{\nentry:")
    places = {name: _argument(text, name) for name in ARGUMENTS}
    size, total_kind = STEP_BYTES[packing.values], _total_kind(packing)
    all_steps = text.let(f"mul i64 {places['groups']}, {places['steps']}")
    whole = text.let(f"mul i64 {all_steps}, {size}")
    weights = []
    for own in range(blocks):
        number = text.let(f"add i64 %block, {own}")
        weights.append(text.at(places["weight"], text.let(f"mul i64 {number}, {whole}")))
    x_step = STEP * rows * (packing.parts if packing.rounds else 4)
    panel = text.let(f"mul i64 {text.let(f'mul i64 %panel, {all_steps}')}, {x_step}")
    x = text.at(places["x"], panel)
    tile = [(m, b) for m in range(rows) for b in range(blocks)]
    sums_of = [(m, b, part) for m, b in tile for part in range(packing.parts)]
    acc_kind = WHOLE if packing.rounds else F
    text.add("  br label %group\ngroup:")
    text.add("  %g = phi i64 [ 0, %entry ], [ %ng, %scaled ]")
    for m, b in tile:
        text.add(f"  %t{m}_{b} = phi {total_kind} [ zeroinitializer, %entry ], [ %nt{m}_{b}, %scaled ]")
    start = text.let(f"mul i64 %g, {places['steps']}")
    zeros = _group_zeros(text, packing, places, blocks)
    text.add("  br label %step\nstep:")
    text.add("  %s = phi i64 [ 0, %group ], [ %ns, %step ]")
    for m, b, part in sums_of:
        key = f"{m}_{b}_{part}"
        text.add(f"  %a{key} = phi {acc_kind} [ zeroinitializer, %group ], [ %na{key}, %step ]")
    at = text.let(f"add i64 {start}, %s")
    x_at = text.at(x, text.let(f"mul i64 {at}, {x_step}"))
    w_at = [text.at(weight, text.let(f"mul i64 {at}, {size}")) for weight in weights]
    body = _integer_step if packing.rounds else _float_step
    sums = body(text, packing, rows, x_at, w_at, zeros, permutes)
    for m, b, part in sums_of:
        text.add(f"  %na{m}_{b}_{part} = bitcast {acc_kind} {sums[m, b, part]} to {acc_kind}")
    text.add(f"  %ns = add i64 %s, 1\n  %inside = icmp ult i64 %ns, {places['steps']}")
    text.add("  br i1 %inside, label %step, label %scaled\nscaled:")
    _scale_group(text, packing, rows, blocks, places, zeros)
    text.add(f"  %ng = add i64 %g, 1\n  %again = icmp ult i64 %ng, {places['groups']}")
    text.add("  br i1 %again, label %group, label %ends\nends:")
    _store(text, packing, rows, blocks, places)
    text.add("  ret void\n}")
    return "\n".join(text.lines)


def _total_kind(packing: Packing) -> str:
    return WHOLE if packing.rounds and not packing.by_group else F


def _group_place(text: _Text, places: Mapping[str, str], own: int, size: int, name: str, group: str) -> str:
    """Where a group's values of a block are, in [groups, N]."""
    row = text.let(f"mul i64 {group}, {places['blocks']}")
    number = text.let(f"add i64 {text.let(f'add i64 {row}, %block')}, {own}")
    return text.at(places[name], text.let(f"mul i64 {number}, {size * LANES}"))


def _weight_group(text: _Text, places: Mapping[str, str]) -> str:
    """The weight's group: ``fine`` of the rows' are one of its."""
    return text.let(f"udiv i64 %g, {places['fine']}")


def _group_zeros(text: _Text, packing: Packing, places: Mapping[str, str], blocks: int) -> list[str]:
    """A vector per block: int32 with ``rounds``, else fp32, less the middle; none where there are none."""
    if not packing.zeros:
        return []
    found = []
    for own in range(blocks):
        place = _group_place(text, places, own, 1, "zeros", _weight_group(text, places))
        zero = text.let(f"zext <16 x i8> {text.load('<16 x i8>', place, 1)} to {WHOLE}")
        if not packing.rounds:
            middle = _same(8 if packing.values == "int4" else 128, "i32")
            zero = text.let(f"sitofp {WHOLE} {text.let(f'sub {WHOLE} {zero}, {middle}')} to {F}")
        found.append(zero)
    return found


def _float_step(
    text: _Text,
    packing: Packing,
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


def _widened(text: _Text, packing: Packing, weight: str, permutes: bool) -> Iterator[str]:
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
            yield text.let(f"bitcast {WHOLE} {text.let(f'shl {WHOLE} {wide}, ' + _same(16, 'i32'))} to {F}")
        elif packing.values == "fp16":
            yield text.let(f"fpext <16 x half> {text.load('<16 x half>', place, 2)} to {F}")
        else:
            wide = text.let(f"sext <16 x i8> {text.load('<16 x i8>', place, 1)} to {WHOLE}")
            yield text.let(f"sitofp {WHOLE} {wide} to {F}")


def _nibble(text: _Text, words: str, column: int, permutes: bool) -> str:
    """q - 8 of 16 outputs."""
    shifted = text.let(f"lshr {WHOLE} {words}, " + _same(4 * column, "i32")) if column else words
    if permutes:  # the instruction reads the low 4 bits alone
        table = "<" + ", ".join(f"float {number - 8:.1f}" for number in range(16)) + ">"
        return text.let(f"call {F} @llvm.x86.avx512.permvar.sf.512({F} {table}, {WHOLE} {shifted})")
    low = text.let(f"and {WHOLE} {shifted}, " + _same(15, "i32"))
    less = text.let(f"sub {WHOLE} {low}, " + _same(8, "i32"))
    return text.let(f"sitofp {WHOLE} {less} to {F}")


def _integer_step(
    text: _Text,
    packing: Packing,
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
            mask = _same(0x0F0F0F0F, "i32")
            high = text.let(f"and {WHOLE} {text.let(f'lshr {WHOLE} {pair}, ' + _same(4, 'i32'))}, {mask}")
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


def _scale_group(
    text: _Text, packing: Packing, rows: int, blocks: int, places: Mapping[str, str], zeros: list[str]
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
    text: _Text, packing: Packing, rows: int, blocks: int, places: Mapping[str, str], zeros: list[str]
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
            zero = zeros[b] if zeros else _same(128, "i32")
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
    text: _Text, packing: Packing, rows: int, blocks: int, places: Mapping[str, str], zeros: list[str]
) -> None:
    """The higher parts together and the lowest, each less zeros: exact. Then fp32, by both scales."""
    group = text.let(f"add i64 {text.let('mul i64 %panel, ' + places['groups'])}, %g")
    offset = text.let(f"mul i64 {group}, {4 * rows}")
    sums = text.at(places["sums"], text.let(f"mul i64 {offset}, 2"))
    middle = _same(8 if packing.values == "int4" else 128, "i32")
    scales = [
        text.load(F, _group_place(text, places, b, 4, "scales", _weight_group(text, places)))
        for b in range(blocks)
    ]
    for m in range(rows):
        totals = [text.splat(text.load("i32", text.at(sums, str(8 * m + 4 * own))), "i32") for own in (0, 1)]
        own = text.let(f"add i64 {offset}, {4 * m}")
        scale = text.splat(text.load("float", text.at(places["row_scales"], own)), "float")
        for b in range(blocks):
            high = text.let(f"shl {WHOLE} %na{m}_{b}_2, " + _same(8, "i32"))
            found = []
            for value, total in zip(
                (text.let(f"add {WHOLE} {high}, %na{m}_{b}_1"), f"%na{m}_{b}_0"), totals, strict=True
            ):
                zero = text.let(f"mul {WHOLE} {zeros[b] if zeros else middle}, {total}")
                found.append(text.let(f"sitofp {WHOLE} {text.let(f'sub {WHOLE} {value}, {zero}')} to {F}"))
            whole = f"{F} {found[0]}, {F} {_same(256.0, 'float')}, {F} {found[1]}"
            part = text.let(f"fmul {F} {text.let(f'call {F} @llvm.fma.v16f32({whole})')}, {scale}")
            total = f"{F} {part}, {F} {scales[b]}, {F} %t{m}_{b}"
            text.add(f"  %nt{m}_{b} = call {F} @llvm.fma.v16f32({total})")


def _store(text: _Text, packing: Packing, rows: int, blocks: int, places: Mapping[str, str]) -> None:
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
