"""Lines of a function of vectors of 16 lanes, in LLVM's language, with names for values.

text = LaneText()
place = text.at("%x", text.let("mul i64 %row, 64"))
wide = text.load(F, place)
"""

from __future__ import annotations

from ingot.kernels.cpu.panel_packing import ARGUMENTS, LANES, NUMBERS

F, WHOLE = f"<{LANES} x float>", f"<{LANES} x i32>"  # vectors of floats and of whole numbers


class LaneText:
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


def same(value: int | float, kind: str) -> str:
    """A constant vector."""
    text = f"{value:.1f}" if kind == "float" else str(value)
    return "<" + ", ".join(f"{kind} {text}" for _ in range(LANES)) + ">"


def argument(text: LaneText, name: str) -> str:
    kind = "i64" if name in NUMBERS else "ptr"
    return text.load(kind, text.at("%args", str(8 * ARGUMENTS.index(name))), 8)
