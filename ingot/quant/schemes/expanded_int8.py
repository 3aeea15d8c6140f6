"""Weights of 4 bits inside values of 8 (w4a8) as a CPU multiplies by them: int8, expanded once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.kernels.rows.int8_rows import Int8Weight
from ingot.kernels.weight.int4_weight import num_groups, pack_pairs
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.int8_products import Int8Products
from ingot.quant.schemes.linear_scheme import LoadedForm, Tensors, tensor_of


@dataclass(frozen=True)
class ExpandedInt8(LoadedForm, Int8Products):
    """The tensors of w4a8 with ``values`` int8 [N, K] in the place of ``pairs``."""

    origin: Int4InInt8

    @property
    def input_group(self) -> int:
        return self.origin.input_group

    @staticmethod
    def of(
        origin: Int4InInt8, tensors: Tensors, in_features: int
    ) -> tuple[ExpandedInt8, dict[str, torch.Tensor]]:
        """The scheme and its tensors."""
        kept = {name: t for name, t in tensors.items() if t is not None and name != "pairs"}
        values = origin.plain_weight(tensors, in_features).values.contiguous()
        return ExpandedInt8(origin), {"values": values} | kept

    def original(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors of w4a8, without loss."""
        values, group = tensor_of(tensors, "values"), self.origin.group
        steps, zeros = tensor_of(tensors, "steps"), tensor_of(tensors, "zeros")
        columns = values.shape[1]
        assert num_groups(columns, group) == len(steps)
        inner, middle = (t.T.repeat_interleave(group, dim=1)[:, :columns] for t in (steps, zeros))
        numbers = (values.to(torch.int16) // inner + middle).to(torch.uint8)
        kept = {name: t for name, t in tensors.items() if t is not None and name != "values"}
        return {"pairs": pack_pairs(numbers, group, zeros)} | kept

    def int8_weight(self, tensors: Tensors, in_features: int, rows: int = 0) -> Int8Weight:
        return Int8Weight(tensor_of(tensors, "values"), tensor_of(tensors, "scales"))

    def plain_weight(self, tensors: Tensors, in_features: int) -> Int8Weight:
        return self.int8_weight(tensors, in_features)
