"""Programmatic dependent launch in Gluon: launch_overlap.py's two functions, which only Triton can call.

start_next(OVERLAP); wait_for_previous(OVERLAP)           # in the kernel
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import constexpr


@gluon.jit
def start_next(OVERLAP: constexpr) -> None:
    """Let the next kernel start once every program of this one has reached this point."""
    if OVERLAP > 1:
        asm: constexpr = "griddepcontrol.launch_dependents; // $0"
        gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_previous(OVERLAP: constexpr) -> None:
    """Wait until the previous kernel has ended and its writes are visible."""
    if OVERLAP > 1:
        asm: constexpr = "griddepcontrol.wait; // $0"
        gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
