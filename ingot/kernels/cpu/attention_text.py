"""The text of attention in a decode step, in LLVM's language: each row is one token of another request.

text = place_text(shape)                     # void place(shared, layer, thread, threads)
text = attend_text(shape, OWN)               # void attend(…); ``ENCODED``: void attend_encoded(…)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.kernels.cpu.function_text import Function, constant, float_bits
from ingot.kernels.cpu.layer_words import CacheShape, CpuLayerShape, reader
from ingot.kernels.cpu.norm_text import head_norm

_V = "<16 x float>"


@dataclass(frozen=True)
class Attended:
    """Names of the function and of the words that it reads."""

    function: str
    query: str
    keys: str
    values: str
    lengths: str
    blocks: str
    block_stride: str


OWN = Attended("attend", "qkv", "keys", "values", "lengths", "blocks", "block_stride")
ENCODED = Attended(
    "attend_encoded", "query", "encoded_keys", "encoded_values",
    "encoded_lengths", "encoded_blocks", "encoded_stride",
)  # fmt: skip


def place_text(shape: CpuLayerShape) -> str:
    """Queries rotated in place; keys rotated, and values, into the cache: the heads of all rows are divided
    among the threads.
    """
    f = Function("define internal void @place(ptr %shared, ptr %layer, i64 %thread, i64 %threads)")
    read = reader(f)
    qkv, keys, values, table = read("qkv"), read("keys"), read("values"), read("table")
    rope_rows, slots = read("rope_rows"), read("slots")
    q_norm, k_norm = read("q_norm"), read("k_norm")
    heads, cache = shape.heads + 2 * shape.kv_heads, shape.cache
    first, last = f.part(f.let(f"mul i64 {read('rows')}, {heads}"))
    with f.loop(first, last) as unit:
        row, head = f.let(f"udiv i64 {unit}, {heads}"), f.let(f"urem i64 {unit}, {heads}")
        start = _slot_place(f, cache, f.load("i64", f.at(slots, row, 8)))
        turn = f.at(table, f.let(f"mul i64 {f.load('i64', f.at(rope_rows, row, 8))}, {shape.rotary}"))
        source = f.at(qkv, f.let(f"mul i64 {row}, {shape.widths['qkv']}"))
        source = f.at(source, f.let(f"mul i64 {head}, {shape.head_dim}"))
        query = f.let(f"icmp slt i64 {head}, {shape.heads}")
        value = f.let(f"icmp sge i64 {head}, {shape.heads + shape.kv_heads}")
        own = f.let(f"sub i64 {head}, {shape.heads}")
        own = f.let(f"urem i64 {own}, {shape.kv_heads}")
        place = f.let(f"add i64 {start}, {f.let(f'mul i64 {own}, {cache.strides[1]}')}")
        cached = f.let(f"select i1 {value}, ptr {f.at(values, place)}, ptr {f.at(keys, place)}")
        target = f.let(f"select i1 {query}, ptr {source}, ptr {cached}")
        plain = f.let(f"xor i1 {value}, true")
        with f.when(plain):
            if shape.qk_norm:
                weight = f.let(f"select i1 {query}, ptr {q_norm}, ptr {k_norm}")
                head_norm(f, source, weight, shape.head_dim, _width(shape.head_dim), shape.eps)
            _rotate(f, shape, source, target, turn)
        with f.when(value):
            _copy(f, source, target, 0, shape.head_dim)
    return str(f)


def _slot_place(f: Function, cache: CacheShape, slot: str) -> str:
    block = f.let(f"udiv i64 {slot}, {cache.block_size}")
    inside = f.let(f"urem i64 {slot}, {cache.block_size}")
    block = f.let(f"mul i64 {block}, {cache.strides[0]}")
    return f.let(f"add i64 {block}, {f.let(f'mul i64 {inside}, {cache.strides[2]}')}")


def _width(size: int) -> int:
    return math.gcd(size, 16)


def _rotate(f: Function, shape: CpuLayerShape, source: str, target: str, turn: str) -> None:
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


def attend_text(shape: CpuLayerShape, names: Attended) -> str:
    """softmax(scale · q Kᵀ) V of each row's newest token: the heads of all rows are divided among the
    threads, each of which has scores of its own.
    """
    f = Function(
        f"define internal void @{names.function}(ptr %shared, ptr %layer, i64 %thread, i64 %threads)"
    )
    read = reader(f)
    query, keys, values, out = read(names.query), read(names.keys), read(names.values), read("attended")
    lengths, blocks, stride = read(names.lengths), read(names.blocks), read(names.block_stride)
    scores = f.at(read("scores"), f.let(f"mul i64 %thread, {read('score_stride')}"))
    cache = shape.encoded if names is ENCODED else shape.cache
    assert cache is not None
    first, last = f.part(f.let(f"mul i64 {read('rows')}, {shape.heads}"))
    with f.loop(first, last) as unit:
        row, head = f.let(f"udiv i64 {unit}, {shape.heads}"), f.let(f"urem i64 {unit}, {shape.heads}")
        length = f.let(f"zext i32 {f.load('i32', f.at(lengths, row))} to i64")
        start = _first_token(f, length, read("window")) if names is OWN else "0"
        q = f.at(query, f.let(f"mul i64 {row}, {shape.widths[names.query]}"))
        q = f.at(q, f.let(f"mul i64 {head}, {shape.head_dim}"))
        own = f.let(f"udiv i64 {head}, {shape.heads // shape.kv_heads}")
        own = f.let(f"mul i64 {own}, {cache.strides[1]}")
        table = f.at(blocks, f.let(f"mul i64 {row}, {stride}"))
        tokens = _Tokens(f, cache, table, own, start, length)
        sums = _weights(f, shape, tokens, q, keys, scores)
        target = f.at(out, f.let(f"mul i64 {row}, {shape.widths['attended']}"))
        target = f.at(target, f.let(f"mul i64 {head}, {shape.head_dim}"))
        _mean(f, shape, tokens, values, scores, sums, target)
    return str(f)


def _first_token(f: Function, length: str, window: str) -> str:
    less = f.let(f"sub i64 {length}, {window}")
    cut = f.let(f"and i1 {f.let(f'icmp sgt i64 {window}, 0')}, {f.let(f'icmp sgt i64 {less}, 0')}")
    return f.let(f"select i1 {cut}, i64 {less}, i64 0")


@dataclass(frozen=True)
class _Tokens:
    """Tokens from ``start`` below ``length`` of a row; ``head``: the offset of a key-value head."""

    f: Function
    cache: CacheShape
    table: str
    head: str
    start: str
    length: str

    def place(self, token: str) -> str:
        f, cache = self.f, self.cache
        number = f.let(f"udiv i64 {token}, {cache.block_size}")
        block = f.let(f"zext i32 {f.load('i32', f.at(self.table, number))} to i64")
        inside = f.let(f"urem i64 {token}, {cache.block_size}")
        place = f.let(f"add i64 {self.head}, {f.let(f'mul i64 {block}, {cache.strides[0]}')}")
        return f.let(f"add i64 {place}, {f.let(f'mul i64 {inside}, {cache.strides[2]}')}")


def _weights(f: Function, shape: CpuLayerShape, tokens: _Tokens, query: str, keys: str, scores: str) -> str:
    """Write e^(score - the largest) of each token; their sums by lane."""
    width = _width(shape.head_dim)
    kind = f"<{width} x float>"
    most = f.variable("float", float_bits(-1e38))
    with f.loop(tokens.start, tokens.length) as token:
        key, dot = f.at(keys, tokens.place(token)), "zeroinitializer"
        for at in range(0, shape.head_dim, width):
            dot = f.fma(f.load(kind, f.at(query, at)), f.load(kind, f.at(key, at)), dot, width)
        score = f.let(f"fmul float {f.total(dot, width)}, {float_bits(shape.scale)}")
        f.store("float", score, f.at(scores, token))
        larger = f.let(f"call float @llvm.maxnum.f32(float {f.load('float', most)}, float {score})")
        f.store("float", larger, most)
    one = f.splat(f.load("float", most), 16)
    f.store(_V, constant(-1e38), f.at(scores, tokens.length))  # the last vector is filled up
    sums = f.variable(_V, "zeroinitializer")
    with f.loop(tokens.start, tokens.length, 16) as token:
        place = f.at(scores, token)
        f.store(_V, f.let(f"fsub {_V} {f.load(_V, place)}, {one}"), place)
        f.add(f"call void @exp16(ptr {place})")
        f.store(_V, f.let(f"fadd {_V} {f.load(_V, sums)}, {f.load(_V, place)}"), sums)
    return f.load(_V, sums)


def _mean(
    f: Function, shape: CpuLayerShape, tokens: _Tokens, values: str, scores: str, sums: str, target: str
) -> None:
    """Write the mean of the tokens' values by these weights."""
    width = _width(shape.head_dim)
    kind = f"<{width} x float>"
    totals = [f.variable(kind, constant(0.0, width)) for _ in range(0, shape.head_dim, width)]
    with f.loop(tokens.start, tokens.length) as token:
        value = f.at(values, tokens.place(token))
        weight = f.splat(f.load("float", f.at(scores, token)), width)
        for number, total in enumerate(totals):
            row = f.load(kind, f.at(value, number * width))
            f.store(kind, f.fma(weight, row, f.load(kind, total), width), total)
    over = f.splat(f.total(sums, 16), width)
    for number, total in enumerate(totals):
        f.store(kind, f.let(f"fdiv {kind} {f.load(kind, total)}, {over}"), f.at(target, number * width))
