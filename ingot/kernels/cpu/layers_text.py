"""The text of a decode step of a few tokens through all layers, in LLVM's language.

It is one call: threads meet at barriers instead of waking up for every operation.

A layer, each part divided among the threads: norm; product of queries, keys, values; rotary embedding and
cache; attention by head; output product; perhaps norm, query product, attention to an encoder's outputs and
its output product; norm; up product; activation; down product. Products are those of product_text.py, after
rows_text.py where they quantize their rows. All other values are fp32.

    text = layers_text([PanelPacking("int4")] * 4, [TILES_OF_AVX512] * 4, CpuLayerShape(...), permutes=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ingot.kernels.cpu.activation_text import activation_text, exp_text
from ingot.kernels.cpu.attention_text import ENCODED, OWN, attend_text, place_text
from ingot.kernels.cpu.barrier_text import barrier_text
from ingot.kernels.cpu.function_text import Function
from ingot.kernels.cpu.layer_words import LAYER_WORDS, PRODUCT_WORDS, SHARED_WORDS, CpuLayerShape, reader
from ingot.kernels.cpu.norm_text import norm_text
from ingot.kernels.cpu.panel_packing import ARGUMENTS, NUMBERS, PanelPacking
from ingot.kernels.cpu.product_text import PRODUCT_DECLARED, Tiles, product_text
from ingot.kernels.cpu.rows_text import ROWS_DECLARED, rows_text


def layers_text(
    packings: Sequence[PanelPacking], tiles: Sequence[Tiles], shape: CpuLayerShape, *, permutes: bool
) -> str:
    """A module with ``layers(args, thread, threads)``; args are ``SHARED_WORDS``, then each layer's
    ``LAYER_WORDS`` and its products' arguments.

    Args:
        packings: of the weights of ``shape.products``, in all layers alike.
        tiles: of each product; one number of rows.
    """
    kinds = list(dict.fromkeys(packings))
    kernels = [f"kernel{kinds.index(packing)}" for packing in packings]
    products, before = [], []
    for number, packing in enumerate(kinds):
        own = tiles[packings.index(packing)]
        products.append(product_text(packing, own, f"kernel{number}", permutes=permutes))
        if packing.rounds:
            products.append(rows_text(packing, f"rows_kernel{number}"))
    for packing, own, kernel in zip(packings, tiles, kernels, strict=True):
        before.append(f"rows_{kernel}" if packing.rounds else "in_panels" if max(own) > 1 else "")
    norm = norm_text(shape.hidden, shape.eps, bias=shape.norm_bias)
    parts = [exp_text(), norm, place_text(shape), attend_text(shape, OWN)]
    parts += [activation_text(shape.mlp, shape.inner), _in_panels()]
    parts += [attend_text(shape, ENCODED)] if shape.encoded else []
    layers = _layers(shape, kernels, before)
    declared = (*PRODUCT_DECLARED, *ROWS_DECLARED, *_declared(), barrier_text())
    return "\n".join((*products, *parts, layers, *declared))


def _declared() -> Iterator[str]:
    yield "declare float @llvm.sqrt.f32(float)"
    yield "declare float @llvm.fma.f32(float, float, float)"
    yield "declare float @llvm.maxnum.f32(float, float)"
    for width in (4, 8, 16):
        yield f"declare float @llvm.vector.reduce.fadd.v{width}f32(float, <{width} x float>)"
        if width < 16:
            kind = f"<{width} x float>"
            yield f"declare {kind} @llvm.fma.v{width}f32({kind}, {kind}, {kind})"
    for name in ("rint", "fabs", "maxnum", "minnum", "copysign"):
        operands = ", ".join(["<16 x float>"] * (1 if name in ("rint", "fabs") else 2))
        yield f"declare <16 x float> @llvm.{name}.v16f32({operands})"


def _in_panels() -> str:
    """Several rows as products of floats read them: panels [columns, rows], columns divided among the
    threads.
    """
    f = Function("define internal void @in_panels(ptr %args, i64 %thread, i64 %threads)")
    words = {
        word: f.word("%args", number, "i64" if word in NUMBERS else "ptr")
        for number, word in enumerate((*ARGUMENTS, "rows"))
    }
    rows, steps, groups = words["rows"], words["steps"], words["groups"]
    columns = f.let(f"mul i64 {f.let(f'mul i64 {steps}, {groups}')}, 8")
    first, last = f.part(columns)
    with f.loop("0", words["panels"]) as panel, f.loop("0", rows) as inside:
        row = f.let(f"add i64 {f.let(f'mul i64 {panel}, {rows}')}, {inside}")
        source = f.at(words["source"], f.let(f"mul i64 {row}, {columns}"))
        before = f.let(f"mul i64 {f.let(f'mul i64 {panel}, {rows}')}, {columns}")
        target = f.at(words["x"], f.let(f"add i64 {before}, {inside}"))
        with f.loop(first, last) as column:
            value = f.load("float", f.at(source, column))
            f.store("float", value, f.at(target, f.let(f"mul i64 {column}, {rows}")))
    return str(f)


def _layers(shape: CpuLayerShape, kernels: Sequence[str], before: Sequence[str]) -> str:
    """``before``: what turns each product's rows into what it reads."""
    f = Function("define void @layers(ptr %shared, i64 %thread, i64 %threads)")
    read = reader(f)
    base, rows = f.at("%shared", len(SHARED_WORDS), 8), read("rows")
    hidden, normed = read("hidden"), read("normed")
    share = "i64 %thread, i64 %threads"
    barrier = f"call void @meet(ptr {read('met')}, i64 %threads)"

    def call(function: str, *arguments: str) -> None:
        f.add(f"call void @{function}({', '.join([*arguments, share])})")
        f.add(barrier)

    def norm(weight: str, bias: str) -> None:
        call("norm", f"ptr {hidden}", f"ptr {weight}", f"ptr {bias}", f"ptr {normed}", f"i64 {rows}")

    with f.loop("0", read("layers")) as number:
        layer = f.at(base, f.let(f"mul i64 {number}, {shape.layer_size}"), 8)

        def own_norm(name: str, layer: str = layer) -> None:
            norm(*(f.word(layer, LAYER_WORDS.index(word), "ptr") for word in (name, f"{name}_bias")))

        def attention(name: str, layer: str = layer) -> None:
            call(name, "ptr %shared", f"ptr {layer}")

        def product(name: str, layer: str = layer) -> None:
            number = shape.products.index(name)
            place = f.at(layer, len(LAYER_WORDS) + number * PRODUCT_WORDS, 8)
            for function in filter(None, (before[number], kernels[number])):
                call(function, f"ptr {place}")

        own_norm("norm")
        product("qkv")
        attention("place")
        attention("attend")
        product("output")
        if shape.encoded:
            own_norm("cross_norm")
            product("query")
            attention("attend_encoded")
            product("cross_output")
        own_norm("mlp_norm")
        product("up")
        call("activate", f"ptr {read('up')}", f"ptr {read('inner')}", f"i64 {rows}")
        product("down")
    norm(read("final_norm"), read("final_norm_bias"))
    return str(f)
