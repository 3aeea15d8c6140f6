"""Weights packed once for a CPU's kernels of ours (kernels/cpu/), in as many bits as they are stored in.

| stored as | panels hold | a product |
|---|---|---|
| fp16, bf16 | the same values | fp32 |
| w8a16, w4a16 | q, zeros, scales in fp32 | fp32: (q - zero), exact, then the group's scale times its sum |
| the same, with VNNI | the same | rows of 23 bits per group in int8 parts; int32, exact, then fp32 |
| w8a8 | q + 128 | int32, exact, then both scales in fp32 |
| w4a8 | q, zeros and inner scales in 8 bits | the same |

Rows of 23 bits are within 2^-22 of their group's largest value: about what sums in fp32 lose. Each output
adds its columns, or its groups of them, in ascending order: a row of a product has the same bits whatever the
other rows, and on any number of threads.

    found = in_panels(scheme, tensors, in_features)      # None: half_packed.py or expanded_int8.py serves
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ingot.kernels.cpu.huge_pages import huge_room
from ingot.kernels.cpu.llvm_module import host_cpu
from ingot.kernels.cpu.panel_packing import LANES, STEP, PanelPacking, Values
from ingot.kernels.cpu.panel_products import (
    Panels,
    packed_values,
    panel_bytes,
    panel_product,
    split_group,
    unpacked_values,
)
from ingot.kernels.rows.int8_rows import Int8Weight
from ingot.kernels.weight.int4_weight import numbers_of, pack_pairs, rows_of
from ingot.kernels.weight.stored_weight import PIECE, row_pieces, unpacked
from ingot.quant.quantized_values import Quantized
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.int8_both import Int8Both
from ingot.quant.schemes.int8_products import Int8Products
from ingot.quant.schemes.linear_scheme import LinearScheme, LoadedForm, Tensors, tensor_of
from ingot.quant.schemes.weight_only import WeightOnly

_MOST_COLUMNS = 1 << 16  # whose sums of 255 · 127 int32 holds
_PADDED_BYTES = 4  # per output: bias, a scale


@dataclass(frozen=True, eq=False)
class InPanels(LoadedForm):
    """Products of fp32 in the place of ``Dense`` and ``WeightOnly``.

    Tensors: ``order`` and ``bias`` as of the other scheme.
    """

    origin: LinearScheme
    panels: Panels
    stored_dtype: torch.dtype | None

    @property
    def splits(self) -> bool:
        return self.panels.packing.split

    @property
    def packed_bytes(self) -> int:
        return self.panels.nbytes

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        order = tensors.get("order")
        rows = x if order is None else x.index_select(-1, order)
        if rows.dim() == 2:
            return panel_product(rows, self.panels)
        y = panel_product(rows.reshape(-1, x.shape[-1]), self.panels)
        return y.view(*x.shape[:-1], self.panels.out_features)

    def dequantize(self, tensors: Tensors, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        return self.origin.dequantize(self.original(tensors), in_features, dtype)

    def original(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors of the other scheme, without loss."""
        kept = {name: t for name, t in tensors.items() if t is not None}
        panels, values = self.panels, unpacked_values(self.panels)
        if self.origin.dense:
            return {"weight": values} | kept
        grid = self.origin.grid
        scales, zeros = (None if t is None else t[:, : len(values)] for t in (panels.scales, panels.zeros))
        if not grid.group:
            scales, zeros = (None if t is None else t[0] for t in (scales, zeros))
        assert scales is not None
        found = Quantized(values, scales.clone(), zeros, grid.bits, grid.group, tensors.get("order"))
        return self.origin.accept(found) | kept

    def batch_invariant(self) -> LinearScheme:
        return self

    def workspace_bytes(
        self, out_features: int, in_features: int, tokens: int, dtype: torch.dtype, *, kernels: bool
    ) -> int:
        """The input in panels and in another order, and the sums of whole tiles."""
        return 2 * (tokens + STEP) * (in_features + out_features + LANES) * 4


@dataclass(frozen=True, eq=False)
class Int8InPanels(LoadedForm, Int8Products):
    """Products of int8 in the place of ``Int8Both`` and ``Int4InInt8``.

    Tensors: ``input_scale`` and ``bias`` as of the other scheme.
    """

    origin: Int8Both | Int4InInt8
    panels: Panels

    @property
    def static(self) -> bool:
        return self.origin.static

    @property
    def input_group(self) -> int:
        return self.origin.input_group

    @property
    def packed_bytes(self) -> int:
        return self.panels.nbytes

    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        y = panel_product(x.reshape(-1, x.shape[-1]).float(), self.panels)
        return y.to(x.dtype).view(*x.shape[:-1], self.panels.out_features)

    def original(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors of the other scheme, without loss."""
        kept = {name: t for name, t in tensors.items() if t is not None}
        panels, values = self.panels, unpacked_values(self.panels)
        scales = panels.scales[0, : len(values)].clone()
        if isinstance(self.origin, Int8Both):
            whole = F.pad((values ^ 128).view(torch.int8), (0, -values.shape[1] % LANES))
            return {"weight": whole, "scales": scales} | kept
        assert panels.zeros is not None
        assert panels.inner is not None
        zeros, inner = (t[:, : len(values)].contiguous() for t in (panels.zeros, panels.inner))
        pairs = pack_pairs(values, self.origin.group, zeros)
        return {"pairs": pairs, "steps": inner, "zeros": zeros, "scales": scales} | kept

    def plain_weight(self, tensors: Tensors, in_features: int) -> Int8Weight:
        return self.origin.plain_weight(self.original(tensors), in_features)

    def int8_weight(self, tensors: Tensors, in_features: int, rows: int = 0) -> Int8Weight:
        return self.plain_weight(tensors, in_features)


def packing_of(scheme: LinearScheme, dtype: torch.dtype, in_features: int) -> PanelPacking | None:
    """How a weight lies in panels here; ``dtype``: of a dense one. None: it cannot."""
    cpu = host_cpu()
    if cpu is None or not cpu.fma or in_features % STEP:
        return None
    if scheme.dense:
        found: dict[torch.dtype, Values] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        return PanelPacking(found[dtype]) if dtype in found else None
    if isinstance(scheme, (Int8Both, Int4InInt8)):
        return _integer_packing(scheme, in_features) if cpu.vnni else None
    if not isinstance(scheme, WeightOnly) or not _fills(scheme.group or in_features, in_features):
        return None
    values: Values = "int4" if scheme.bits == 4 else "int8"
    zeros, split = not scheme.symmetric, cpu.vnni
    return PanelPacking(values, zeros=zeros, rounds=split, by_group=split, split=split)


def split_columns(scheme: LinearScheme, in_features: int) -> int:
    """Columns of an input in fp32 that share a scale where a CPU splits it in int8 parts; 0: none does."""
    group = (scheme.group or in_features) if isinstance(scheme, WeightOnly) and not scheme.dense else 0
    return split_group(group) if group and in_features % STEP == 0 and _fills(group, in_features) else 0


def splits_here() -> bool:
    """Whether this machine's CPU splits inputs in fp32."""
    cpu = host_cpu()
    return cpu is not None and cpu.fma and cpu.vnni


def _fills(group: int, columns: int) -> bool:
    """Whether groups are whole steps and fill the columns."""
    return group % STEP == 0 and columns % group == 0


def _integer_packing(scheme: Int8Both | Int4InInt8, in_features: int) -> PanelPacking | None:
    group = scheme.group if isinstance(scheme, Int4InInt8) else in_features
    inputs = scheme.input_group or group
    if in_features > _MOST_COLUMNS or not (_fills(group, in_features) and _fills(inputs, group)):
        return None
    four = isinstance(scheme, Int4InInt8)
    by_group = bool(scheme.input_group) and not scheme.static
    return PanelPacking("int4" if four else "int8", zeros=four, rounds=True, by_group=by_group)


def in_panels_bytes(scheme: LinearScheme, packing: PanelPacking, out_features: int, in_features: int) -> int:
    """Bytes of panels, less those of the small tensors whose place they also take."""
    filled = -out_features % LANES
    exact = packing.rounds and not packing.split
    group = in_features if exact and packing.values == "int8" else getattr(scheme, "group", 0)
    groups = in_features // (group or in_features)
    own = panel_bytes(packing, out_features, in_features) + _PADDED_BYTES * (out_features + filled)
    if scheme.dense:
        return own + _PADDED_BYTES * (out_features + filled)
    own += _PADDED_BYTES * filled * (1 if exact else groups)
    return own + filled * groups * (packing.zeros + (exact and packing.values == "int4"))


def in_panels(
    scheme: LinearScheme, tensors: Tensors, in_features: int
) -> tuple[InPanels | Int8InPanels, dict[str, torch.Tensor]] | None:
    """A weight in panels, and the tensors that stay beside them; None where panels cannot hold it."""
    weight = tensors.get("weight")
    packing = packing_of(scheme, torch.float32 if weight is None else weight.dtype, in_features)
    if packing is None:
        return None
    names = ("order", "bias", "input_scale")
    kept = {name: t for name, t in tensors.items() if t is not None and name in names}
    out_features = _out_features(scheme, tensors, in_features)
    values = huge_room(panel_bytes(packing, out_features, in_features))
    values = values.view(-(-out_features // LANES), in_features // STEP, -1)
    done = 0
    for piece in _pieces(scheme, tensors, in_features):
        packed = packed_values(piece, packing.values, rounds=packing.rounds)
        values[done : (done := done + len(packed))] = packed
    width = LANES * len(values)
    scales, zeros = tensors.get("scales"), tensors.get("zeros")
    group = (0 if isinstance(scheme, Int8Both) else getattr(scheme, "group", 0)) or in_features
    panels = Panels(
        packing,
        values,
        torch.ones(1, width) if scales is None else _filled(scales.float(), width),
        None if zeros is None else _filled(zeros, width),
        _filled(tensor_of(tensors, "steps"), width) if "steps" in tensors else None,
        torch.zeros(width) if tensors.get("bias") is None else _filled(kept["bias"].float(), width)[0],
        out_features,
        group,
        _row_group(scheme, packing, group),
        kept.get("input_scale"),
    )
    if isinstance(scheme, (Int8Both, Int4InInt8)):
        return Int8InPanels(scheme, panels), kept
    return InPanels(scheme, panels, None if weight is None else weight.dtype), kept


def _row_group(scheme: LinearScheme, packing: PanelPacking, group: int) -> int:
    """Columns of a row that share a scale; 0: all."""
    if packing.split:
        return split_group(group)
    return scheme.input_group if packing.by_group and isinstance(scheme, (Int8Both, Int4InInt8)) else 0


def _filled(small: torch.Tensor, width: int) -> torch.Tensor:
    """Values [N] or [groups, N] → [groups, width]."""
    return F.pad(torch.atleast_2d(small), (0, width - small.shape[-1])).contiguous()


def _out_features(scheme: LinearScheme, tensors: Tensors, in_features: int) -> int:
    if isinstance(scheme, WeightOnly):
        return scheme.stored(tensors, in_features).out_features
    return len(tensor_of(tensors, "pairs" if isinstance(scheme, Int4InInt8) else "weight"))


def _pieces(scheme: LinearScheme, tensors: Tensors, in_features: int) -> Iterator[torch.Tensor]:
    """Rows of the weight as ``packed_values`` takes them, whole blocks at a time."""
    if isinstance(scheme, WeightOnly):
        for piece in row_pieces(scheme.stored(tensors, in_features), PIECE):
            yield unpacked(piece)
        return
    rows = max(PIECE // in_features // LANES, 1) * LANES
    if isinstance(scheme, Int4InInt8):
        weight = scheme.int4_weight(tensors, in_features)
        for start in range(0, len(weight.pairs), rows):
            yield numbers_of(rows_of(weight, start, start + rows))
        return
    for piece in tensor_of(tensors, "weight").split(rows):
        yield piece if scheme.dense else piece[:, :in_features].contiguous().view(torch.uint8) ^ 128
