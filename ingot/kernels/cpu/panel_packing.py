"""How a weight lies in panels, and the arguments of a product by it.

A weight lies in blocks of 16 outputs: [N / 16, steps, bytes of a step], a step being 8 columns.

    packing = PanelPacking("int4", zeros=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LANES = 16  # outputs of a block
STEP = 8  # columns of a step
Values = Literal["bf16", "fp16", "int8", "int4"]
STEP_BYTES: Mapping[Values, int] = {"bf16": 256, "fp16": 256, "int8": 128, "int4": 64}
ARGUMENTS = (
    "x", "weight", "scales", "zeros", "inner", "bias", "residual", "y",
    "blocks", "panels", "groups", "steps", "sums", "row_scales", "fine", "source", "count", "static",
)  # fmt: skip
NUMBERS = ("blocks", "panels", "groups", "steps", "fine", "count", "rows")  # "rows": behind the arguments


@dataclass(frozen=True)
class PanelPacking:
    """How values lie and what they mean.

    Attributes:
        values: bf16 and fp16 as they are; int8 as q - 128, int4 as q.
        zeros: whether each group has a zero of its own; otherwise 128 or 8.
        rounds: products are of int8 rows, sums are exact: int8 is then q in 0 … 255 with a zero of 128.
        by_group: with ``rounds``: rows have a scale per group of columns.
        split: with ``by_group``: rows have three int8 values per column (rows_text.py), weights a scale per
            group.
    """

    values: Values
    zeros: bool = False
    rounds: bool = False
    by_group: bool = False
    split: bool = False

    @property
    def parts(self) -> int:
        """int8 values per column of a row."""
        return 3 if self.split else 1
