"""Launchers of GPTQ's walk over a block of columns on meta tensors, as in compile_cases.py.

GPTQ_CASES["gptq 128 of 22016 uint8"]()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ingot.kernels.weight.gptq_block import MOST_COLUMNS, gptq_block
from tests.kernels.compile_cases import FULL, LONG, empty
from tests.kernels.numerics import launched


def walk(columns: int, outputs: int, dtype: torch.dtype) -> None:
    weight, grid = empty(columns, outputs, dtype=FULL), empty(32, outputs, dtype=FULL)
    factor, numbers = empty(4096, 4096, dtype=FULL)[:columns, :columns], empty(columns, outputs, dtype=dtype)
    beside = (empty(columns, dtype=FULL), grid, grid, empty(columns, dtype=LONG))
    launched(gptq_block)(weight, factor, *beside, 0, 15, numbers)


GPTQ_CASES: dict[str, Callable[[], Any]] = {
    f"gptq {columns} of {outputs} {str(dtype).removeprefix('torch.')}": partial(walk, columns, outputs, dtype)
    for columns, outputs, dtype in (
        (128, 22016, torch.uint8),
        (128, 4096, torch.int8),
        (96, 4096, torch.uint8),
        (MOST_COLUMNS, 4096, torch.float32),
        (37, 97, torch.uint8),
        (1, 4096, torch.uint8),
    )
}
