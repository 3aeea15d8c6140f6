"""The text of products of few rows by packed weights, in LLVM's language.

A tile is ``rows`` by ``blocks`` sums of 16 lanes, one per output, so that no sum is ever split: each output
adds its columns in ascending order, whatever the tile, the other rows and the threads. Rows of several are
read as panels [columns, rows].

    text = product_text(PanelPacking("int4", zeros=True), TILES_OF_AVX512, "kernel", permutes=True)
"""

from __future__ import annotations

from collections.abc import Mapping

from ingot.kernels.cpu.lane_text import WHOLE, F, LaneText, argument
from ingot.kernels.cpu.panel_packing import ARGUMENTS, STEP, STEP_BYTES, PanelPacking
from ingot.kernels.cpu.product_steps_text import float_step, integer_step
from ingot.kernels.cpu.product_totals_text import group_zeros, kind_of_totals, scale_group, store_totals

Tiles = Mapping[int, int]  # blocks of a tile by its rows
TILES_OF_AVX512: Tiles = {1: 4, 4: 4, 8: 2}
TILES_OF_OTHERS: Tiles = {1: 2, 4: 1, 8: 1}
SPLIT_TILES: Tiles = {1: 4, 4: 2}
PRODUCT_DECLARED = (
    f"declare {F} @llvm.fma.v16f32({F}, {F}, {F})",
    f"declare {F} @llvm.x86.avx512.permvar.sf.512({F}, {WHOLE})",
    'attributes #0 = { nounwind "min-legal-vector-width"="512" "prefer-vector-width"="512" }',
)


def product_text(packing: PanelPacking, tiles: Tiles, name: str, *, permutes: bool) -> str:
    """``void NAME(args, thread, threads)``, beside ``PRODUCT_DECLARED``; ``permutes``: AVX-512 finds floats
    of 4 bits in a register.
    """
    functions = [
        _tile(packing, rows, blocks, name, permutes)
        for rows, most in tiles.items()
        for blocks in sorted({1, most})
    ]
    return "\n".join([*functions, _kernel(tiles, name)])


def _kernel(tiles: Tiles, name: str) -> str:
    """A thread's blocks, by the tile of ``rows`` (the last argument)."""
    text = LaneText()
    text.add(f"define void @{name}(ptr %args, i64 %thread, i64 %threads) #0 {{\nentry:")
    blocks, panels = (argument(text, name) for name in ("blocks", "panels"))
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


def _tile(packing: PanelPacking, rows: int, blocks: int, name: str, permutes: bool) -> str:
    """``NAME_ROWS_BLOCKS(args, block, panel)``: two loops, of groups and of a group's steps."""
    text = LaneText()
    head = f"define internal void @{name}_{rows}_{blocks}(ptr noalias %args, i64 %block, i64 %panel)"
    text.add(f"{head} #0 {{\nentry:")
    places = {name: argument(text, name) for name in ARGUMENTS}
    size, total_kind = STEP_BYTES[packing.values], kind_of_totals(packing)
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
    zeros = group_zeros(text, packing, places, blocks)
    text.add("  br label %step\nstep:")
    text.add("  %s = phi i64 [ 0, %group ], [ %ns, %step ]")
    for m, b, part in sums_of:
        key = f"{m}_{b}_{part}"
        text.add(f"  %a{key} = phi {acc_kind} [ zeroinitializer, %group ], [ %na{key}, %step ]")
    at = text.let(f"add i64 {start}, %s")
    x_at = text.at(x, text.let(f"mul i64 {at}, {x_step}"))
    w_at = [text.at(weight, text.let(f"mul i64 {at}, {size}")) for weight in weights]
    body = integer_step if packing.rounds else float_step
    sums = body(text, packing, rows, x_at, w_at, zeros, permutes)
    for m, b, part in sums_of:
        text.add(f"  %na{m}_{b}_{part} = bitcast {acc_kind} {sums[m, b, part]} to {acc_kind}")
    text.add(f"  %ns = add i64 %s, 1\n  %inside = icmp ult i64 %ns, {places['steps']}")
    text.add("  br i1 %inside, label %step, label %scaled\nscaled:")
    scale_group(text, packing, rows, blocks, places, zeros)
    text.add(f"  %ng = add i64 %g, 1\n  %again = icmp ult i64 %ng, {places['groups']}")
    text.add("  br i1 %again, label %group, label %ends\nends:")
    store_totals(text, packing, rows, blocks, places)
    text.add("  ret void\n}")
    return "\n".join(text.lines)
