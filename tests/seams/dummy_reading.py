"""How a proof reads the dummy scheme's tensors: from the description of its layout, without its code."""

from __future__ import annotations

import torch

from ingot.building.source.plain_readings import PlainReading, StoredRows, register_reading
from ingot.building.source.rounding_limits import Rule
from ingot.quant.schemes.plain_unpacking import PlainGrid, grid_of_int8
from tests.seams.dummy_scheme import Dummy8


def _grid(scheme: Dummy8, stored: StoredRows, columns: int) -> PlainGrid:
    scales = stored.own("mantissas").double() * 2.0 ** stored.own("exponents").double()
    return grid_of_int8(stored.own("values"), scales)


def _rule(scheme: Dummy8, method: str, dtype: torch.dtype) -> Rule:
    return Rule(levels=127, zeros=False, stored=torch.float32, nearest=True)


def register() -> None:
    """Make proofs read the scheme."""
    register_reading(Dummy8, PlainReading(_grid, _rule))
