"""The text of a decode step of one token through all layers, in LLVM's language.

It is one call: threads meet at barriers instead of waking up for every operation.

A layer, each part divided among the threads: norm; product of queries, keys, values; rotary embedding and
cache; attention by head; output product; norm; gate and up; SiLU; down. Products are those of
product_text.py, after rows_text.py where they quantize their rows. All other values are fp32.

    text = layers_text([Packing("int4")] * 4, [TILES_OF_AVX512] * 4, LayerShape(...), permutes=True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ingot.kernels.cpu.barrier_text import barrier_text
from ingot.kernels.cpu.function_text import Function, constant, float_bits
from ingot.kernels.cpu.product_text import ARGUMENTS, PRODUCT_DECLARED, Packing, Tiles, product_text
from ingot.kernels.cpu.rows_text import ROWS_DECLARED, rows_text

PRODUCTS = ("qkv", "output", "up", "down")
PRODUCT_WORDS = len(ARGUMENTS) + 1
LAYER_WORDS = ("norm", "mlp_norm", "q_norm", "k_norm", "keys", "values", "table", "window")
SHARED_WORDS = (
    "layers", "hidden", "normed", "qkv", "attended", "gate_up", "inner", "scores", "score_stride",
    "final_norm", "rope_row", "slot", "length", "blocks", "met",
)  # fmt: skip
LAYER_SIZE = len(LAYER_WORDS) + len(PRODUCTS) * PRODUCT_WORDS
_NUMBERS = ("window", "score_stride", "rope_row", "slot", "length")


@dataclass(frozen=True)
class LayerShape:
    """What is the same in all layers. ``strides``: of the cache's block, head and token, in values."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    eps: float
    scale: float
    qk_norm: bool
    block_size: int
    strides: tuple[int, int, int]

    @property
    def fits(self) -> bool:
        """Whether vectors fill what they are used for."""
        whole = self.hidden % 16 == 0 and self.inner % 16 == 0
        return whole and self.head_dim % 8 == 0 and self.rotary % 8 == 0 and self.head_dim <= 256


def layers_text(
    packings: Sequence[Packing], tiles: Sequence[Tiles], shape: LayerShape, *, permutes: bool
) -> str:
    """A module with ``layers(args, thread, threads)``; args are ``SHARED_WORDS``, then each layer's
    ``LAYER_WORDS`` and its products' arguments.

    Args:
        packings: of the weights of ``PRODUCTS``, in all layers alike.
        tiles: of each product.
    """
    kinds = list(dict.fromkeys(packings))
    kernels = [f"kernel{kinds.index(packing)}" for packing in packings]
    products = []
    for number, packing in enumerate(kinds):
        own = {1: tiles[packings.index(packing)][1]}
        products.append(product_text(packing, own, f"kernel{number}", permutes=permutes))
        if packing.rounds:
            products.append(rows_text(packing, f"rows_kernel{number}"))
    rounds = [packing.rounds for packing in packings]
    parts = (_exp(), _norm(shape), _place(shape), _attend(shape), _gate(shape))
    layers = _layers(shape, kernels, rounds)
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
    for name in ("rint", "maxnum", "minnum"):
        operands = ", ".join(["<16 x float>"] * (1 if name == "rint" else 2))
        yield f"declare <16 x float> @llvm.{name}.v16f32({operands})"


def _width(size: int) -> int:
    return math.gcd(size, 16)


def _exp() -> str:
    """e^x within 2 units in the last place; 0 below -87. x = n · ln 2 + r, a polynomial of r times 2^n."""
    f, v = Function("define internal void @exp16(ptr %x)"), "<16 x float>"
    x = f.load(v, "%x")
    small = f.let(f"fcmp olt {v} {x}, {constant(-87.0)}")
    low = f.let(f"call {v} @llvm.maxnum.v16f32({v} {x}, {v} {constant(-87.0)})")
    low = f.let(f"call {v} @llvm.minnum.v16f32({v} {low}, {v} {constant(88.0)})")
    n = f.let(f"call {v} @llvm.rint.v16f32({v} {f.let(f'fmul {v} {low}, {constant(math.log2(math.e))}')})")
    r = f.fma(n, constant(-0.693359375), low, 16)
    r = f.fma(n, constant(2.12194440e-4), r, 16)
    y = constant(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        y = f.fma(y, r, constant(term), 16)
    y = f.fma(y, f.let(f"fmul {v} {r}, {r}"), f.let(f"fadd {v} {r}, {constant(1.0)}"), 16)
    power = f.let(f"fptosi {v} {n} to <16 x i32>")
    power = f.let(f"shl <16 x i32> {power}, <{', '.join(['i32 23'] * 16)}>")
    bits = f.let(f"bitcast {v} {y} to <16 x i32>")
    y = f.let(f"bitcast <16 x i32> {f.let(f'add <16 x i32> {power}, {bits}')} to {v}")
    y = f.let(f"select <16 x i1> {small}, {v} zeroinitializer, {v} {y}")
    nan = f.let(f"fcmp uno {v} {x}, {x}")  # a score that is not a number must be seen, not be left out
    f.store(v, f.let(f"select <16 x i1> {nan}, {v} {x}, {v} {y}"), "%x")
    return str(f)


def _root(f: Function, squares: str, count: int, eps: float) -> str:
    """1 / sqrt(squares / count + eps)."""
    mean = f.let(f"fdiv float {squares}, {float_bits(count)}")
    root = f.let(f"call float @llvm.sqrt.f32(float {f.let(f'fadd float {mean}, {float_bits(eps)}')})")
    return f.let(f"fdiv float {float_bits(1.0)}, {root}")


def _squares(f: Function, x: str, count: int, width: int) -> str:
    kind = f"<{width} x float>"
    sums = f.variable(kind, "zeroinitializer")
    with f.loop("0", str(count), width) as at:
        own = f.load(kind, f.at(x, at))
        f.store(kind, f.fma(own, own, f.load(kind, sums), width), sums)
    return f.total(f.load(kind, sums), width)


def _norm(shape: LayerShape) -> str:
    """RMSNorm of the hidden states: every thread adds up the squares and writes its share."""
    f = Function("define internal void @norm(ptr %x, ptr %weight, ptr %out, i64 %thread, i64 %threads)")
    v = "<16 x float>"
    one = f.splat(_root(f, _squares(f, "%x", shape.hidden, 16), shape.hidden, shape.eps), 16)
    first, last = f.part(shape.hidden // 16)
    with f.loop(first, last) as number:
        at = f.let(f"mul i64 {number}, 16")
        wide = f.let(f"fmul {v} {f.load(v, f.at('%x', at))}, {one}")
        f.store(v, f.let(f"fmul {v} {wide}, {f.load(v, f.at('%weight', at))}"), f.at("%out", at))
    return str(f)


def _place(shape: LayerShape) -> str:
    """Queries rotated in place; keys rotated, and values, into the cache: heads divided among the threads."""
    f = Function("define internal void @place(ptr %shared, ptr %layer, i64 %thread, i64 %threads)")
    read = _reader(f)
    qkv, keys, values, table = read("qkv"), read("keys"), read("values"), read("table")
    row, slot = read("rope_row"), read("slot")
    q_norm, k_norm = read("q_norm"), read("k_norm")
    block = f.let(f"udiv i64 {slot}, {shape.block_size}")
    inside = f.let(f"urem i64 {slot}, {shape.block_size}")
    start = f.let(
        f"add i64 {f.let(f'mul i64 {block}, {shape.strides[0]}')}, "
        f"{f.let(f'mul i64 {inside}, {shape.strides[2]}')}"
    )
    turn = f.at(table, f.let(f"mul i64 {row}, {shape.rotary}"))
    first, last = f.part(shape.heads + 2 * shape.kv_heads)
    with f.loop(first, last) as head:
        source = f.at(qkv, f.let(f"mul i64 {head}, {shape.head_dim}"))
        query = f.let(f"icmp slt i64 {head}, {shape.heads}")
        value = f.let(f"icmp sge i64 {head}, {shape.heads + shape.kv_heads}")
        own = f.let(f"sub i64 {head}, {shape.heads}")
        own = f.let(f"urem i64 {own}, {shape.kv_heads}")
        place = f.let(f"add i64 {start}, {f.let(f'mul i64 {own}, {shape.strides[1]}')}")
        cached = f.let(f"select i1 {value}, ptr {f.at(values, place)}, ptr {f.at(keys, place)}")
        target = f.let(f"select i1 {query}, ptr {source}, ptr {cached}")
        plain = f.let(f"xor i1 {value}, true")
        with f.when(plain):
            if shape.qk_norm:
                weight = f.let(f"select i1 {query}, ptr {q_norm}, ptr {k_norm}")
                _norm_head(f, shape, source, weight)
            _rotate(f, shape, source, target, turn)
        with f.when(value):
            _copy(f, source, target, 0, shape.head_dim)
    return str(f)


def _reader(f: Function) -> Callable[[str], str]:
    """Reads a word of %shared or %layer by its name."""

    def read(name: str) -> str:
        base, words = ("%layer", LAYER_WORDS) if name in LAYER_WORDS else ("%shared", SHARED_WORDS)
        return f.word(base, words.index(name), "i64" if name in _NUMBERS else "ptr")

    return read


def _norm_head(f: Function, shape: LayerShape, source: str, weight: str) -> None:
    width = _width(shape.head_dim)
    kind = f"<{width} x float>"
    squares = _squares(f, source, shape.head_dim, width)
    one = f.splat(_root(f, squares, shape.head_dim, shape.eps), width)
    for at in range(0, shape.head_dim, width):
        wide = f.let(f"fmul {kind} {f.load(kind, f.at(source, at))}, {one}")
        f.store(kind, f.let(f"fmul {kind} {wide}, {f.load(kind, f.at(weight, at))}"), f.at(source, at))


def _rotate(f: Function, shape: LayerShape, source: str, target: str, turn: str) -> None:
    half = shape.rotary // 2
    width = _width(half)
    kind = f"<{width} x float>"
    for at in range(0, half, width):
        a, b = f.load(kind, f.at(source, at)), f.load(kind, f.at(source, half + at))
        cos, sin = f.load(kind, f.at(turn, at)), f.load(kind, f.at(turn, half + at))
        products = [f.let(f"fmul {kind} {x}, {y}") for x, y in ((a, cos), (b, sin), (b, cos), (a, sin))]
        f.store(kind, f.let(f"fsub {kind} {products[0]}, {products[1]}"), f.at(target, at))
        f.store(kind, f.let(f"fadd {kind} {products[2]}, {products[3]}"), f.at(target, half + at))
    _copy(f, source, target, shape.rotary, shape.head_dim)


def _copy(f: Function, source: str, target: str, first: int, last: int) -> None:
    for at in range(first, last, 8):
        f.store("<8 x float>", f.load("<8 x float>", f.at(source, at)), f.at(target, at))


def _attend(shape: LayerShape) -> str:
    """softmax(scale · q Kᵀ) V of the newest token, heads divided among the threads."""
    f = Function("define internal void @attend(ptr %shared, ptr %layer, i64 %thread, i64 %threads)")
    read = _reader(f)
    qkv, keys, values, out = read("qkv"), read("keys"), read("values"), read("attended")
    length, window, blocks = read("length"), read("window"), read("blocks")
    less = f.let(f"sub i64 {length}, {window}")
    cut = f.let(f"and i1 {f.let(f'icmp sgt i64 {window}, 0')}, {f.let(f'icmp sgt i64 {less}, 0')}")
    start = f.let(f"select i1 {cut}, i64 {less}, i64 0")
    width, v = _width(shape.head_dim), "<16 x float>"
    kind = f"<{width} x float>"
    first, last = f.part(shape.heads)
    with f.loop(first, last) as head:
        scores = f.at(read("scores"), f.let(f"mul i64 {head}, {read('score_stride')}"))
        query = f.at(qkv, f.let(f"mul i64 {head}, {shape.head_dim}"))
        own = f.let(f"udiv i64 {head}, {shape.heads // shape.kv_heads}")
        own = f.let(f"mul i64 {own}, {shape.strides[1]}")
        most = f.variable("float", float_bits(-1e38))
        with f.loop(start, length) as token:
            key = f.at(keys, _token_place(f, shape, token, blocks, own))
            dot = "zeroinitializer"
            for at in range(0, shape.head_dim, width):
                dot = f.fma(f.load(kind, f.at(query, at)), f.load(kind, f.at(key, at)), dot, width)
            score = f.let(f"fmul float {f.total(dot, width)}, {float_bits(shape.scale)}")
            f.store("float", score, f.at(scores, token))
            f.store(
                "float",
                f.let(f"call float @llvm.maxnum.f32(float {f.load('float', most)}, float {score})"),
                most,
            )
        one = f.splat(f.load("float", most), 16)
        behind = f.at(scores, length)
        f.store(v, constant(-1e38), behind)  # the last vector is filled up
        sums = f.variable(v, "zeroinitializer")
        with f.loop(start, length, 16) as token:
            place = f.at(scores, token)
            f.store(v, f.let(f"fsub {v} {f.load(v, place)}, {one}"), place)
            f.add(f"call void @exp16(ptr {place})")
            f.store(v, f.let(f"fadd {v} {f.load(v, sums)}, {f.load(v, place)}"), sums)
        sums_of = [f.variable(kind, "zeroinitializer") for _ in range(0, shape.head_dim, width)]
        with f.loop(start, length) as token:
            value = f.at(values, _token_place(f, shape, token, blocks, own))
            weight = f.splat(f.load("float", f.at(scores, token)), width)
            for number, total in enumerate(sums_of):
                row = f.load(kind, f.at(value, number * width))
                f.store(kind, f.fma(weight, row, f.load(kind, total), width), total)
        over = f.splat(f.total(f.load(v, sums), 16), width)
        target = f.at(out, f.let(f"mul i64 {head}, {shape.head_dim}"))
        for number, total in enumerate(sums_of):
            f.store(kind, f.let(f"fdiv {kind} {f.load(kind, total)}, {over}"), f.at(target, number * width))
    return str(f)


def _token_place(f: Function, shape: LayerShape, token: str, blocks: str, own: str) -> str:
    number = f.let(f"udiv i64 {token}, {shape.block_size}")
    block = f.let(f"zext i32 {f.load('i32', f.at(blocks, number))} to i64")
    inside = f.let(f"urem i64 {token}, {shape.block_size}")
    place = f.let(f"add i64 {own}, {f.let(f'mul i64 {block}, {shape.strides[0]}')}")
    return f.let(f"add i64 {place}, {f.let(f'mul i64 {inside}, {shape.strides[2]}')}")


def _gate(shape: LayerShape) -> str:
    """silu(gate) · up, columns divided among the threads."""
    f = Function("define internal void @gate(ptr %x, ptr %out, i64 %thread, i64 %threads)")
    v = "<16 x float>"
    room = f.variable(v, "zeroinitializer")
    first, last = f.part(shape.inner // 16)
    with f.loop(first, last) as number:
        at = f.let(f"mul i64 {number}, 16")
        gate = f.load(v, f.at("%x", at))
        f.store(v, f.let(f"fneg {v} {gate}"), room)
        f.add(f"call void @exp16(ptr {room})")
        below = f.let(f"fadd {v} {f.load(v, room)}, {constant(1.0)}")
        bent = f.let(f"fdiv {v} {gate}, {below}")
        up = f.load(v, f.at("%x", f.let(f"add i64 {at}, {shape.inner}")))
        f.store(v, f.let(f"fmul {v} {bent}, {up}"), f.at("%out", at))
    return str(f)


def _layers(shape: LayerShape, kernels: Sequence[str], rounds: Sequence[bool]) -> str:
    f = Function("define void @layers(ptr %shared, i64 %thread, i64 %threads)")
    read = _reader(f)
    count = f.word("%shared", SHARED_WORDS.index("layers"), "i64")
    hidden, normed, inner, wide = read("hidden"), read("normed"), read("inner"), read("gate_up")
    base = f.at("%shared", len(SHARED_WORDS), 8)
    share = "i64 %thread, i64 %threads"
    barrier = f"call void @meet(ptr {read('met')}, i64 %threads)"

    def norm(weight: str) -> None:
        f.add(f"call void @norm(ptr {hidden}, ptr {weight}, ptr {normed}, {share})")
        f.add(barrier)

    with f.loop("0", count) as number:
        layer = f.at(base, f.let(f"mul i64 {number}, {LAYER_SIZE}"), 8)

        def own(name: str, layer: str = layer) -> str:
            return f.word(layer, LAYER_WORDS.index(name), "ptr")

        def product(name: str, layer: str = layer) -> None:
            number = PRODUCTS.index(name)
            place = f.at(layer, len(LAYER_WORDS) + number * PRODUCT_WORDS, 8)
            if rounds[number]:
                f.add(f"call void @rows_{kernels[number]}(ptr {place}, {share})")
                f.add(barrier)
            f.add(f"call void @{kernels[number]}(ptr {place}, {share})")
            f.add(barrier)

        norm(own("norm"))
        product("qkv")
        for part in ("place", "attend"):
            f.add(f"call void @{part}(ptr %shared, ptr {layer}, {share})")
            f.add(barrier)
        product("output")
        norm(own("mlp_norm"))
        product("up")
        f.add(f"call void @gate(ptr {wide}, ptr {inner}, {share})")
        f.add(barrier)
        product("down")
    norm(read("final_norm"))
    return str(f)
