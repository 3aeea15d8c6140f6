"""Looking inside a step or an encoding while it runs: an observer gets places (step_record.py) and values
there, in the order of computation. A value may be overwritten once the call has returned.

    batch = replace(batch, observer=both(record.see, reader))
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.operand_rows import OperandRows

Observed = torch.Tensor | Int8Rows | OperandRows
Observer = Callable[[str, Observed], None]


def both(first: Observer | None, second: Observer) -> Observer:
    """An observer that passes on to two, of which the first may be missing."""
    if first is None:
        return second
    one = first

    def observe(place: str, value: Observed) -> None:
        one(place, value)
        second(place, value)

    return observe
