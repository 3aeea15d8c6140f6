"""How the stored tensors of each scheme are read and judged, apart from the scheme's own code, in proofs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ingot.building.source.rounding_limits import Cuts, Rule
from ingot.kernels.weight.stored_weight import StoredWeight
from ingot.quant.schemes.fp8_both import Fp8Both
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.int8_blocks import Int8Blocks
from ingot.quant.schemes.int8_both import Int8Both
from ingot.quant.schemes.linear_scheme import LinearScheme
from ingot.quant.schemes.plain_unpacking import (
    PlainGrid,
    grid_of_blocks,
    grid_of_e4m3,
    grid_of_int8,
    grid_of_pairs,
    grid_of_words,
)
from ingot.quant.schemes.weight_only import WeightOnly

WORD_ROWS = 16  # rows whose words are interleaved
SCALED_ROWS = 128  # of a block of e4m3, and its columns


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some rows of a layer's stored tensors, moved to the device that judges them."""

    tensors: Mapping[str, torch.Tensor]
    rows: slice
    device: torch.device

    def own(self, name: str) -> torch.Tensor:
        """Of a tensor whose first dimension is rows."""
        return self.tensors[name][self.rows].to(self.device)

    def across(self, name: str) -> torch.Tensor:
        """Of a tensor whose last dimension is rows."""
        return self.tensors[name][..., self.rows].to(self.device)

    def words(self) -> torch.Tensor:
        """Of packed words, with the padding of the last block."""
        padded = slice(self.rows.start, -(-self.rows.stop // WORD_ROWS) * WORD_ROWS)
        return self.tensors["words"][padded].to(self.device)


@dataclass(frozen=True, slots=True)
class PlainReading:
    """One scheme's stored tensors as a proof reads them.

    Attributes:
        grid: (scheme, stored rows, columns K) → what the rows mean, and could have meant.
        rule: (scheme, method, the engine's dtype) → how the values follow from the weight.
    """

    grid: Callable[[Any, StoredRows, int], PlainGrid]
    rule: Callable[[Any, str, torch.dtype], Rule]


def register_reading(scheme: type[LinearScheme], reading: PlainReading) -> None:
    """Read and judge the stored tensors of a scheme's class, and of its subclasses, by ``reading``.

    Raises ValueError where the class has one.
    """
    if scheme in READINGS:
        raise ValueError(f"{scheme.__name__} has a plain reading already")
    READINGS[scheme] = reading


def reading_of(scheme: LinearScheme) -> PlainReading:
    """The reading of a scheme's class, or of the nearest class that it is made from; LookupError for none."""
    for one in type(scheme).__mro__:
        if one in READINGS:
            return READINGS[one]
    raise LookupError(f"scheme {scheme.name} has no plain reading: see register_reading in {__name__}")


def _word_grid(scheme: WeightOnly, stored: StoredRows, columns: int) -> PlainGrid:
    zeros = None if scheme.symmetric else stored.across("zeros")
    scales = stored.across("scales")
    return grid_of_words(StoredWeight(stored.words(), columns, scales, zeros, scheme.bits, scheme.group))


def _word_rule(scheme: WeightOnly, method: str, dtype: torch.dtype) -> Rule:
    zeros, bits = not scheme.symmetric, scheme.bits
    levels = (1 << bits) - 1 if zeros else 127 if bits == 8 else 8
    narrowed: dict[str, Cuts] = {"gptq": "shrunk", "awq": "cut"} if bits == 4 else {}
    return Rule(levels, zeros, dtype, method != "gptq", narrowed.get(method, "none"))


def _pair_grid(scheme: Int4InInt8, stored: StoredRows, columns: int) -> PlainGrid:
    pairs, scales = stored.own("pairs"), stored.own("scales")
    return grid_of_pairs(pairs, stored.across("steps"), stored.across("zeros"), scales, scheme.group, columns)


def _pair_rule(scheme: Int4InInt8, method: str, dtype: torch.dtype) -> Rule:
    return Rule(15, True, torch.float32, method != "gptq", units=119, inner=True)


def _int8_grid(scheme: Int8Both | Int8Blocks, stored: StoredRows, columns: int) -> PlainGrid:
    return grid_of_int8(stored.own("weight")[:, :columns], stored.own("scales"))


def _int8_rule(scheme: Int8Both | Int8Blocks, method: str, dtype: torch.dtype) -> Rule:
    return Rule(127, False, torch.float32, method != "gptq")


def _fp8_grid(scheme: Fp8Both, stored: StoredRows, columns: int) -> PlainGrid:
    values = stored.own("weight")[:, :columns]
    if not scheme.blocks:
        return grid_of_e4m3(values, stored.own("scales"))
    block = torch.arange(stored.rows.start, stored.rows.stop) // SCALED_ROWS
    return grid_of_e4m3(values, stored.tensors["scales"][block].to(stored.device))


def _fp8_rule(scheme: Fp8Both, method: str, dtype: torch.dtype) -> Rule:
    return Rule(448, False, torch.float32, nearest=True, floating=True)


def _block_grid(scheme: Int8Blocks, stored: StoredRows, columns: int) -> PlainGrid:
    if scheme.weight_bits != 4:
        return _int8_grid(scheme, stored, columns)
    return grid_of_blocks(stored.own("weight")[:, :columns], stored.own("scales"), scheme.block)


def _block_rule(scheme: Int8Blocks, method: str, dtype: torch.dtype) -> Rule:
    if scheme.weight_bits != 4:
        return _int8_rule(scheme, method, dtype)
    return Rule(8, False, torch.float32, method != "gptq", units=120)


READINGS: dict[type[LinearScheme], PlainReading] = {
    WeightOnly: PlainReading(_word_grid, _word_rule),
    Int4InInt8: PlainReading(_pair_grid, _pair_rule),
    Int8Both: PlainReading(_int8_grid, _int8_rule),
    Fp8Both: PlainReading(_fp8_grid, _fp8_rule),
    Int8Blocks: PlainReading(_block_grid, _block_rule),
}
