"""The text of exponents and of an MLP's activation, in LLVM's language.

text = exp_text()                            # void exp16(x): e^x of 16 values in place
text = activation_text("gelu", 4096)         # void activate(x, out, rows, thread, threads)
"""

from __future__ import annotations

import math

from ingot.kernels.cpu.function_text import Function, constant
from ingot.kernels.cpu.layer_words import Activation

_V = "<16 x float>"
_NEAR = (-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
_FAR = (-1.72853470e-5, 3.83197126e-4, -3.88396438e-3, 2.42546219e-2, -1.06777877e-1, -6.34846687e-1,
        -1.28717512e-1)  # fmt: skip
_NEAR_END = 0.927734375


def exp_text() -> str:
    """e^x within 2 units in the last place; 0 below -87. x = n · ln 2 + r, a polynomial of r times 2^n."""
    f, v = Function("define internal void @exp16(ptr %x)"), _V
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


def activation_text(activation: Activation, size: int) -> str:
    """Rows [rows, size] of ``out``, of a gated MLP from [rows, 2 size]: their vectors are divided among the
    threads.
    """
    head = "define internal void @activate(ptr %x, ptr %out, i64 %rows, i64 %thread, i64 %threads)"
    f, gated = Function(head), activation == "silu_gated"
    bend = {"silu_gated": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu}[activation]
    room = f.variable(_V, "zeroinitializer")
    first, last = f.part(f.let(f"mul i64 %rows, {size // 16}"))
    with f.loop(first, last) as number:
        at = f.let(f"mul i64 {number}, 16")
        place = at
        if gated:  # a row is twice as wide
            row = f.let(f"udiv i64 {number}, {size // 16}")
            place = f.let(f"add i64 {at}, {f.let(f'mul i64 {row}, {size}')}")
        y = bend(f, f.load(_V, f.at("%x", place)), room)
        if gated:
            up = f.load(_V, f.at("%x", f.let(f"add i64 {place}, {size}")))
            y = f.let(f"fmul {_V} {y}, {up}")
        f.store(_V, y, f.at("%out", at))
    return str(f)


def _exp(f: Function, x: str, room: str) -> str:
    f.store(_V, x, room)
    f.add(f"call void @exp16(ptr {room})")
    return f.load(_V, room)


def _sigmoid(f: Function, x: str, of: str, room: str) -> str:
    """x / (1 + e^-of), by e^-|of|, which cannot overflow."""
    small = _exp(f, f.let(f"fneg {_V} {f.let(f'call {_V} @llvm.fabs.v16f32({_V} {of})')}"), room)
    below = f.let(f"fcmp olt {_V} {of}, zeroinitializer")
    over = f.let(f"select <16 x i1> {below}, {_V} {small}, {_V} {constant(1.0)}")
    part = f.let(f"fdiv {_V} {over}, {f.let(f'fadd {_V} {small}, {constant(1.0)}')}")
    return f.let(f"fmul {_V} {x}, {part}")


def _silu(f: Function, x: str, room: str) -> str:
    return _sigmoid(f, x, x, room)


def _gelu_tanh(f: Function, x: str, room: str) -> str:
    """x (1 + tanh(u)) / 2 = x / (1 + e^-2u), u = sqrt(2 / π) (x + 0.044715 x³)."""
    twice = math.sqrt(8 / math.pi)
    square = f.let(f"fmul {_V} {x}, {x}")
    of = f.fma(square, constant(0.044715 * twice), constant(twice), 16)
    return _sigmoid(f, x, f.let(f"fmul {_V} {of}, {x}"), room)


def _relu(f: Function, x: str, room: str) -> str:
    """What is not a number stays it."""
    below = f.let(f"fcmp olt {_V} {x}, zeroinitializer")
    return f.let(f"select <16 x i1> {below}, {_V} zeroinitializer, {_V} {x}")


def _gelu(f: Function, x: str, room: str) -> str:
    """x (1 + erf(x / sqrt 2)) / 2; erf within 1.5 units in the last place (N. Juffa's polynomials)."""
    a = f.let(f"fmul {_V} {x}, {constant(math.sqrt(0.5))}")
    square, t = f.let(f"fmul {_V} {a}, {a}"), f.let(f"call {_V} @llvm.fabs.v16f32({_V} {a})")
    near = constant(_NEAR[0])
    for term in _NEAR[1:]:
        near = f.fma(near, square, constant(term), 16)
    near = f.fma(near, a, a, 16)
    far = constant(_FAR[0])
    for term in _FAR[1:]:
        far = f.fma(far, t, constant(term), 16)
    far = f.fma(far, t, f.let(f"fneg {_V} {t}"), 16)
    far = f.let(f"fsub {_V} {constant(1.0)}, {_exp(f, far, room)}")
    far = f.let(f"call {_V} @llvm.copysign.v16f32({_V} {far}, {_V} {a})")
    beyond = f.let(f"fcmp ogt {_V} {t}, {constant(_NEAR_END)}")  # not of what is no number
    erf = f.let(f"select <16 x i1> {beyond}, {_V} {far}, {_V} {near}")
    half = f.let(f"fmul {_V} {x}, {constant(0.5)}")
    return f.fma(half, erf, half, 16)
