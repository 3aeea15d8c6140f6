"""Products on a CPU by weights in panels of 16 outputs, which kernels of ours read (product_text.py).

y = float_product(x, panels)                   # x fp32 [M, K] → [M, N]
y = integer_product(Int8Rows(...), panels)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ingot.kernels.cpu.llvm_module import Launch, compiled, host_cpu
from ingot.kernels.cpu.product_text import (
    ARGUMENTS,
    LANES,
    STEP,
    STEP_BYTES,
    TILES_OF_AVX512,
    TILES_OF_OTHERS,
    Packing,
    Tiles,
    Values,
    product_text,
)
from ingot.kernels.rows.int8_rows import Int8Rows


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight [N, K] in panels.

    Attributes:
        packing: what the values are.
        values: uint8 [ceil(N / 16), K / 8, bytes of a step].
        scales: fp32 [groups, 16 · ceil(N / 16)]; with ``rounds`` [1, …].
        zeros: uint8 [groups, …], of ``packing.zeros``.
        inner: uint8 [groups, …], of int4 with ``rounds``.
        bias: fp32 [16 · ceil(N / 16)], zeros where there is none.
        out_features: N.
        group: columns of a group; K where there is one.
    """

    packing: Packing
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    inner: torch.Tensor | None
    bias: torch.Tensor
    out_features: int
    group: int

    @property
    def in_features(self) -> int:
        return self.values.shape[1] * STEP

    @property
    def nbytes(self) -> int:
        tensors = (self.values, self.scales, self.zeros, self.inner, self.bias)
        return sum(0 if tensor is None else tensor.nbytes for tensor in tensors)


def tiles() -> Tiles:
    cpu = host_cpu()
    return TILES_OF_AVX512 if cpu is not None and cpu.avx512 else TILES_OF_OTHERS


@cache
def _kernel(packing: Packing) -> Launch:
    cpu = host_cpu()
    assert cpu is not None
    return compiled(product_text(packing, tiles(), permutes=cpu.avx512))


def _rows_of_tile(rows: int) -> int:
    return next((count for count in tiles() if rows <= count), max(tiles()))


def _in_panels(x: torch.Tensor, rows: int, step: int) -> torch.Tensor:
    """[M, K] → [ceil(M / rows), K / step, rows, step], filled up with zeros."""
    if rows == 1:
        return x.contiguous()
    if missing := -len(x) % rows:
        x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
    return x.view(-1, rows, x.shape[1] // step, step).transpose(1, 2).contiguous()


def float_product(x: torch.Tensor, panels: Panels, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x · Wᵀ + bias (+ residual), x fp32 [M, K] → [M, N]; each output adds its columns in order, in fp32."""
    rows = _rows_of_tile(len(x))
    own = _in_panels(x, rows, 1)
    groups = len(panels.scales)
    return _launched(panels, panels.packing, own, len(x), rows, groups, residual)


def integer_product(x: Int8Rows, panels: Panels) -> torch.Tensor:
    """x · Wᵀ + bias of int8 rows: exact sums, scaled in fp32 by the rows' scales, then by the weight's."""
    rows = _rows_of_tile(len(x.values))
    count, columns = x.values.shape
    own = _in_panels(x.values, rows, 4)
    group = x.group or panels.group
    groups = columns // group
    sums = x.values.view(count, groups, group).sum(-1, dtype=torch.int32)
    scales = x.scales
    if not x.group and len(scales) != count:
        scales = scales.expand(count)
    packing = panels.packing
    if x.group:
        packing = Packing(packing.values, packing.zeros, rounds=True, by_group=True)
        scales = _in_panels(scales, rows, 1)
    elif missing := -count % rows:
        scales = torch.cat((scales, scales.new_zeros(missing)))
    sums = _in_panels(sums, rows, 1)
    return _launched(
        panels, packing, own, count, rows, groups, None, sums, scales.contiguous(), panels.group // group
    )


def _launched(
    panels: Panels,
    packing: Packing,
    x: torch.Tensor,
    count: int,
    rows: int,
    groups: int,
    residual: torch.Tensor | None,
    sums: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
    fine: int = 1,
) -> torch.Tensor:
    if count == 0:  # of a step that wants no logits; the kernel's loops run once at least
        return torch.empty(0, panels.out_features)
    number = -(-count // rows)
    width = LANES * len(panels.values)
    y = torch.empty(number * rows, width)
    fits = residual is not None and residual.shape == y.shape and residual.is_contiguous()
    addresses = _addresses(x, panels, residual if fits else None, y)
    ends = [0 if tensor is None else tensor.data_ptr() for tensor in (sums, row_scales)]
    steps = panels.in_features // STEP // groups
    arguments = [*addresses, len(panels.values), number, groups, steps, *ends, fine, rows]
    assert len(arguments) == len(ARGUMENTS) + 1
    _kernel(packing)(arguments, torch.get_num_threads())
    if number * rows != count or width != panels.out_features:
        y = y[:count, : panels.out_features].contiguous()
    return y if residual is None or fits else y.add_(residual)


def _addresses(x: torch.Tensor, panels: Panels, residual: torch.Tensor | None, y: torch.Tensor) -> list[int]:
    own = (panels.values, panels.scales, panels.zeros, panels.inner, panels.bias)
    return [0 if tensor is None else tensor.data_ptr() for tensor in (x, *own, residual, y)]


def one_row(x: torch.Tensor, panels: Panels, residual: torch.Tensor | None, y: torch.Tensor) -> list[int]:
    """Arguments of the kernel of a float product of one row, between buffers of whole vectors."""
    groups = len(panels.scales)
    sizes = [len(panels.values), 1, groups, panels.in_features // STEP // groups, 0, 0, 1, 1]
    return _addresses(x, panels, residual, y) + sizes


def packed_values(values: torch.Tensor, kind: Values, *, rounds: bool = False) -> torch.Tensor:
    """``Panels.values`` of a weight [N, K]: bf16, fp16, or uint8 quantized values."""
    if missing := -len(values) % LANES:
        values = torch.cat((values, values.new_zeros(missing, values.shape[1])))
    blocks, steps = len(values) // LANES, values.shape[1] // STEP
    by_lane = values.view(blocks, LANES, -1).transpose(1, 2).contiguous()  # [B, K, 16]
    if kind in ("bf16", "fp16"):
        found = by_lane.view(torch.uint8)
    elif not rounds and kind == "int8":
        found = by_lane ^ 128  # q - 128 as int8
    elif not rounds:
        nibbles = by_lane.view(blocks, steps, STEP // 2, 2, LANES)
        found = (nibbles[:, :, :, 0] | nibbles[:, :, :, 1] << 4).transpose(2, 3)
    else:
        fours = by_lane.view(blocks, steps, 2, 4, LANES).transpose(3, 4)  # [B, steps, 2, 16, 4]
        found = fours if kind == "int8" else fours[:, :, 0] | fours[:, :, 1] << 4
    return found.reshape(blocks, steps, STEP_BYTES[kind])


def unpacked_values(panels: Panels) -> torch.Tensor:
    """The weight [N, K] of which ``packed_values`` made panels."""
    kind, packed = panels.packing.values, panels.values
    blocks, steps = packed.shape[:2]
    if kind in ("bf16", "fp16"):
        by_lane = packed.view(torch.bfloat16 if kind == "bf16" else torch.float16)
        by_lane = by_lane.view(blocks, steps * STEP, LANES)
    elif not panels.packing.rounds and kind == "int8":
        by_lane = packed.view(blocks, -1, LANES) ^ 128
    elif not panels.packing.rounds:
        pairs = packed.view(blocks, steps, LANES, STEP // 2).transpose(2, 3)
        by_lane = torch.stack((pairs & 15, pairs >> 4), dim=3).view(blocks, -1, LANES)
    else:
        fours = packed.view(blocks, steps, -1, LANES, 4)
        if kind == "int4":
            fours = torch.cat((fours & 15, fours >> 4), dim=2)
        by_lane = fours.transpose(3, 4).reshape(blocks, -1, LANES)
    return by_lane.transpose(1, 2).reshape(blocks * LANES, -1)[: panels.out_features]


def panel_bytes(packing: Packing, out_features: int, in_features: int) -> int:
    """Bytes of ``Panels.values``."""
    return -(-out_features // LANES) * (in_features // STEP) * STEP_BYTES[packing.values]
