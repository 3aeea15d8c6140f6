"""Sums of e^(x - the largest) over rows of logits on a CPU, in float64, by a kernel of ours.

sums = exp_sums(logits, highest)               # logits fp32 [B, V], highest fp32 [B] → int64 [B]
"""

from __future__ import annotations

import math
import struct
from functools import cache

import torch

from ingot.kernels.cpu.function_text import Function
from ingot.kernels.cpu.llvm_module import Launch, compiled, host_cpu

ONE_BITS = 40  # a weight of 1 is 2^40
_V, _I, _LANES = "<8 x double>", "<8 x i64>", 8
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # n times it is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_TERMS = 13  # of e^r: r^14 / 14! is below 2^-56 for |r| ≤ ln 2 / 2
_ROUND = 1.5 * 2.0**52  # added to a double, leaves it rounded in the low bits
_ARGUMENTS = ("x", "highest", "sums", "rows", "columns")


def has_exp_sums(logits: torch.Tensor) -> bool:
    """Whether the kernel takes these, on this processor."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or not logits.is_contiguous():
        return False
    cpu = host_cpu()
    return cpu is not None and cpu.fma and logits.numel() > 0


def exp_sums(logits: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """Of each row the sum of rint(2^40 · e^(x - highest)), a sum of integers: the same whatever the order.

    Args:
        logits: [B, V] contiguous fp32, none above ``highest`` nor NaN.
        highest: [B] contiguous fp32, finite.
    """
    rows, columns = logits.shape
    threads = torch.get_num_threads()
    sums = torch.zeros(threads, rows, dtype=torch.int64)  # OpenMP may give fewer threads: theirs come first
    words = (logits.data_ptr(), highest.data_ptr(), sums.data_ptr(), rows, columns)
    _kernel()(words, threads)
    return sums.sum(0)


@cache
def _kernel() -> Launch:
    return compiled("\n".join((_text(), *_DECLARED)), "sums")


_DECLARED = (
    f"declare {_V} @llvm.fma.v8f64({_V}, {_V}, {_V})",
    f"declare {_V} @llvm.rint.v8f64({_V})",
    f"declare {_V} @llvm.maxnum.v8f64({_V}, {_V})",
    f"declare i64 @llvm.vector.reduce.add.v8i64({_I})",
    'attributes #0 = { nounwind "min-legal-vector-width"="512" "prefer-vector-width"="512" }',
)


def _text() -> str:
    """Columns of each row are divided among the threads, eight at a time; the last one takes the rest."""
    f = Function("define void @sums(ptr %args, i64 %thread, i64 %threads)")
    x, highest, out = (f.word("%args", _ARGUMENTS.index(name), "ptr") for name in ("x", "highest", "sums"))
    rows, columns = (f.word("%args", _ARGUMENTS.index(name), "i64") for name in ("rows", "columns"))
    whole = f.let(f"udiv i64 {columns}, {_LANES}")
    first, last = f.part(whole)
    start, end = (f.let(f"mul i64 {number}, {_LANES}") for number in (first, last))
    ends = f.let(f"icmp eq i64 {f.let('add i64 %thread, 1')}, %threads")
    rest = f.let(f"select i1 {ends}, i64 {columns}, i64 {end}")
    room, sums = f.variable("<8 x float>", "zeroinitializer"), f.variable(_I, "zeroinitializer")
    with f.loop("0", rows) as row:
        own = f.at(x, f.let(f"mul i64 {row}, {columns}"))
        most = _splat(f, f.let(f"fpext float {f.load('float', f.at(highest, row))} to double"))
        f.store(_I, "zeroinitializer", sums)
        with f.loop(start, end, _LANES) as at:
            _add(f, sums, f.load("<8 x float>", f.at(own, at)), most)
        f.store("<8 x float>", "<" + ", ".join(["float 0xFFF0000000000000"] * 8) + ">", room)
        with f.loop(end, rest) as at:
            place = f.at(room, f.let(f"sub i64 {at}, {end}"))
            f.store("float", f.load("float", f.at(own, at)), place)
        _add(f, sums, f.load("<8 x float>", room), most)
        total = f.let(f"call i64 @llvm.vector.reduce.add.v8i64({_I} {f.load(_I, sums)})")
        place = f.let(f"add i64 {f.let(f'mul i64 %thread, {rows}')}, {row}")
        f.store("i64", total, f.at(out, place, 8))
    return str(f)


def _add(f: Function, sums: str, x: str, most: str) -> None:
    """x - most = n · ln 2 + r; a polynomial of r, times 2^(n + 40)."""
    less = f.let(f"fsub {_V} {f.let(f'fpext <8 x float> {x} to {_V}')}, {most}")
    less = f.let(f"call {_V} @llvm.maxnum.v8f64({_V} {less}, {_V} {_same(-40.0)})")  # 2^40 e^-40 is 5e-6
    n = f.let(f"call {_V} @llvm.rint.v8f64({_V} {f.let(f'fmul {_V} {less}, {_same(math.log2(math.e))}')})")
    r = _fma(f, n, _same(-_LN2_HIGH), less)
    r = _fma(f, n, _same(-_LN2_LOW), r)
    y = _same(1 / math.factorial(_TERMS))
    for power in range(_TERMS - 1, -1, -1):
        y = _fma(f, y, r, _same(1 / math.factorial(power)))
    exponent = f.let(f"fptosi {_V} {n} to <8 x i32>")
    exponent = f.let(f"add <8 x i32> {exponent}, <{', '.join([f'i32 {ONE_BITS}'] * 8)}>")
    shift = f.let(f"shl {_I} {f.let(f'sext <8 x i32> {exponent} to {_I}')}, <{', '.join(['i64 52'] * 8)}>")
    bits = f.let(f"add {_I} {f.let(f'bitcast {_V} {y} to {_I}')}, {shift}")
    near = f.let(f"fadd {_V} {f.let(f'bitcast {_I} {bits} to {_V}')}, {_same(_ROUND)}")
    beyond = ", ".join([f"i64 {_bits(_ROUND)}"] * 8)
    bits = f.let(f"sub {_I} {f.let(f'bitcast {_V} {near} to {_I}')}, <{beyond}>")
    f.store(_I, f.let(f"add {_I} {f.load(_I, sums)}, {bits}"), sums)


def _fma(f: Function, a: str, b: str, c: str) -> str:
    return f.let(f"call {_V} @llvm.fma.v8f64({_V} {a}, {_V} {b}, {_V} {c})")


def _splat(f: Function, value: str) -> str:
    one = f.let(f"insertelement {_V} poison, double {value}, i64 0")
    return f.let(f"shufflevector {_V} {one}, {_V} poison, <8 x i32> zeroinitializer")


def _same(value: float) -> str:
    return "<" + ", ".join([f"double 0x{_bits(value):016X}"] * 8) + ">"


def _bits(value: float) -> int:
    found: int = struct.unpack(">q", struct.pack(">d", value))[0] & (1 << 64) - 1
    return found
