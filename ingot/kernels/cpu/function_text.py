"""Functions in LLVM's language, written line by line, with loops.

f = Function("define void @twice(ptr %x)")
with f.loop("0", "8") as at:
    f.store("float", f.load("float", f.at("%x", at)), f.at("%y", at))
text = str(f)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager


class Function:
    """Lines of a function. Variables are places on the stack, which LLVM turns into registers."""

    def __init__(self, head: str) -> None:
        self.head = head
        self.places: list[str] = []
        self.lines: list[str] = []
        self._count = 0

    def __str__(self) -> str:
        return "\n".join([f"{self.head} #0 {{", "entry:", *self.places, *self.lines, "  ret void", "}"])

    def name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def let(self, expression: str) -> str:
        name = self.name()
        self.lines.append(f"  %{name} = {expression}")
        return f"%{name}"

    def add(self, line: str) -> None:
        self.lines.append(f"  {line}")

    def at(self, base: str, index: str | int, size: int = 4) -> str:
        offset = str(index * size) if isinstance(index, int) else self.let(f"mul i64 {index}, {size}")
        return self.let(f"getelementptr i8, ptr {base}, i64 {offset}")

    def word(self, base: str, number: int, kind: str) -> str:
        return self.let(f"load {kind}, ptr {self.at(base, number, 8)}, align 8")

    def load(self, kind: str, place: str) -> str:
        return self.let(f"load {kind}, ptr {place}, align 4")

    def store(self, kind: str, value: str, place: str) -> None:
        self.add(f"store {kind} {value}, ptr {place}, align 4")

    def variable(self, kind: str, value: str) -> str:
        name = self.name()
        self.places.append(f"  %{name} = alloca {kind}, align 64")
        self.add(f"store {kind} {value}, ptr %{name}, align 4")
        return f"%{name}"

    def splat(self, value: str, width: int) -> str:
        kind = f"<{width} x float>"
        one = self.let(f"insertelement {kind} poison, float {value}, i64 0")
        return self.let(f"shufflevector {kind} {one}, {kind} poison, <{width} x i32> zeroinitializer")

    def total(self, vector: str, width: int) -> str:
        kind = f"<{width} x float>"
        return self.let(
            f"call reassoc float @llvm.vector.reduce.fadd.v{width}f32(float 0.0, {kind} {vector})"
        )

    def fma(self, a: str, b: str, c: str, width: int) -> str:
        kind = f"<{width} x float>"
        return self.let(f"call {kind} @llvm.fma.v{width}f32({kind} {a}, {kind} {b}, {kind} {c})")

    def largest(self, a: str, b: str) -> str:
        """Of two i64."""
        return self.let(f"select i1 {self.let(f'icmp sgt i64 {a}, {b}')}, i64 {a}, i64 {b}")

    def smallest(self, a: str, b: str) -> str:
        return self.let(f"select i1 {self.let(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")

    @contextmanager
    def loop(self, first: str, last: str, step: int = 1) -> Iterator[str]:
        """Numbers from ``first`` below ``last``."""
        place, label = self.variable("i64", first), self.name()
        self.lines += [f"  br label %{label}", f"{label}:"]
        number = self.load("i64", place)
        inside = self.let(f"icmp slt i64 {number}, {last}")
        self.lines += [f"  br i1 {inside}, label %{label}_in, label %{label}_out", f"{label}_in:"]
        yield number
        self.store("i64", self.let(f"add i64 {number}, {step}"), place)
        self.lines += [f"  br label %{label}", f"{label}_out:"]

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        label = self.name()
        self.lines += [f"  br i1 {condition}, label %{label}_then, label %{label}_after", f"{label}_then:"]
        yield
        self.lines += [f"  br label %{label}_after", f"{label}_after:"]

    def part(self, count: int | str) -> tuple[str, str]:
        """This thread's share of so many."""
        first = self.let(f"udiv i64 {self.let(f'mul i64 %thread, {count}')}, %threads")
        after = self.let("add i64 %thread, 1")
        return first, self.let(f"udiv i64 {self.let(f'mul i64 {after}, {count}')}, %threads")


def float_bits(value: float) -> str:
    """A constant: LLVM writes floats as the bits of a double."""
    near = struct.unpack("f", struct.pack("f", value))[0]
    return "0x" + struct.pack(">d", near).hex().upper()


def constant(value: float, width: int = 16) -> str:
    return "<" + ", ".join([f"float {float_bits(value)}"] * width) + ">"
