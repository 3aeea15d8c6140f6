"""One way to look inside a step or an encoding while it runs.

Owns the type: an observer gets a place and the value there, from the layers of either half, in the order in
which they compute. Places are those of step_record.py. Knows no layer and keeps no copy: a value may be
written over when the call has returned.

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
    """An observer that passes on to two of them, of which the first may be missing."""
    if first is None:
        return second
    one = first

    def observe(place: str, value: Observed) -> None:
        one(place, value)
        second(place, value)

    return observe
