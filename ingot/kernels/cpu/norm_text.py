"""The text of norms over rows, in LLVM's language.

text = norm_text(1024, 1e-5, bias=True)      # void norm(x, weight, bias, out, rows, thread, threads)
"""

from __future__ import annotations

from collections.abc import Callable

from ingot.kernels.cpu.function_text import Function, constant, float_bits

_V = "<16 x float>"


def norm_text(size: int, eps: float, *, bias: bool) -> str:
    """RMSNorm, with ``bias`` LayerNorm, of rows of ``size`` values: the vectors of all rows are divided among
    the threads, and each adds up the rows of which it has some.
    """
    head = "define internal void @norm(ptr %x, ptr %weight, ptr %bias, ptr %out"
    f = Function(f"{head}, i64 %rows, i64 %thread, i64 %threads)")
    vectors = size // 16
    first, last = f.part(f.let(f"mul i64 %rows, {vectors}"))
    from_row = f.let(f"udiv i64 {first}, {vectors}")
    to_row = f.let(f"udiv i64 {f.let(f'add i64 {last}, {vectors - 1}')}, {vectors}")
    with f.loop(from_row, to_row) as row:
        before = f.let(f"mul i64 {row}, {vectors}")
        start = f.largest(f.let(f"sub i64 {first}, {before}"), "0")
        end = f.smallest(f.let(f"sub i64 {last}, {before}"), str(vectors))
        offset = f.let(f"mul i64 {row}, {size}")
        x, out = f.at("%x", offset), f.at("%out", offset)
        mean = None
        if bias:
            total = f.total(_sums(f, x, size, 16, lambda own, sums: f.let(f"fadd {_V} {sums}, {own}")), 16)
            mean = f.splat(f.let(f"fdiv float {total}, {float_bits(size)}"), 16)
        one = f.splat(root(f, _squares(f, x, size, 16, mean), size, eps), 16)
        with f.loop(start, end) as number:
            at = f.let(f"mul i64 {number}, 16")
            own = f.load(_V, f.at(x, at))
            own = own if mean is None else f.let(f"fsub {_V} {own}, {mean}")
            wide, weight = f.let(f"fmul {_V} {own}, {one}"), f.load(_V, f.at("%weight", at))
            wide = f.let(f"fmul {_V} {wide}, {weight}")
            wide = f.let(f"fadd {_V} {wide}, {f.load(_V, f.at('%bias', at))}") if bias else wide
            f.store(_V, wide, f.at(out, at))
    return str(f)


def head_norm(f: Function, source: str, weight: str, size: int, width: int, eps: float) -> None:
    """RMSNorm of a head's ``size`` channels, in place, by vectors of ``width``."""
    kind = f"<{width} x float>"
    one = f.splat(root(f, _squares(f, source, size, width), size, eps), width)
    for at in range(0, size, width):
        wide = f.let(f"fmul {kind} {f.load(kind, f.at(source, at))}, {one}")
        f.store(kind, f.let(f"fmul {kind} {wide}, {f.load(kind, f.at(weight, at))}"), f.at(source, at))


def root(f: Function, squares: str, count: int, eps: float) -> str:
    """1 / sqrt(squares / count + eps)."""
    mean = f.let(f"fdiv float {squares}, {float_bits(count)}")
    found = f.let(f"call float @llvm.sqrt.f32(float {f.let(f'fadd float {mean}, {float_bits(eps)}')})")
    return f.let(f"fdiv float {float_bits(1.0)}, {found}")


def _squares(f: Function, x: str, count: int, width: int, mean: str | None = None) -> str:
    """The sum of squares, less a ``mean``."""
    kind = f"<{width} x float>"

    def add(own: str, sums: str) -> str:
        own = own if mean is None else f.let(f"fsub {kind} {own}, {mean}")
        return f.fma(own, own, sums, width)

    return f.total(_sums(f, x, count, width, add), width)


def _sums(f: Function, x: str, count: int, width: int, add: Callable[[str, str], str]) -> str:
    """By lane."""
    kind = f"<{width} x float>"
    sums = f.variable(kind, constant(0.0, width))
    with f.loop("0", str(count), width) as at:
        own = f.load(kind, f.at(x, at))
        f.store(kind, add(own, f.load(kind, sums)), sums)
    return f.load(kind, sums)
