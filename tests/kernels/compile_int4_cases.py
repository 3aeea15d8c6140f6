"""Launchers of kernels over weights of 4 bits inside numbers of 8 on meta tensors, as in compile_cases.py.

INT4_CASES["expanded 4096 by 128"]()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.kernels.weight.expand_int8 import expand_int8
from ingot.kernels.weight.int4_weight import Int4Weight, num_groups
from tests.kernels.compile_cases import FULL, empty
from tests.kernels.numerics import launched


def int4(outputs: int, width: int, group: int) -> Int4Weight:
    groups = num_groups(width, group)
    pairs = empty(outputs, groups * group // 2, dtype=torch.uint8)
    beside = empty(groups, outputs, dtype=torch.uint8)
    return Int4Weight(pairs, beside, beside, empty(outputs, dtype=FULL), group, width)


INT4_CASES: dict[str, Callable[[], Any]] = {
    "expanded 4096 by 128": lambda: launched(expand_int8)(int4(22016, 4096, 128)),
    "expanded 11008 by 64": lambda: launched(expand_int8)(int4(4096, 11008, 64)),
    "expanded 1000 by 128": lambda: launched(expand_int8)(int4(97, 1000, 128)),
}
