"""Products on a CPU by weights in panels of 16 outputs, which kernels of ours read (product_text.py).

y = panel_product(x, panels)                   # x fp32 [M, K] → [M, N]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ingot.kernels.cpu.barrier_text import BARRIER_WORDS, barrier_text
from ingot.kernels.cpu.llvm_module import Launch, compiled, host_cpu
from ingot.kernels.cpu.panel_packing import ARGUMENTS, LANES, STEP, STEP_BYTES, PanelPacking, Values
from ingot.kernels.cpu.product_text import (
    PRODUCT_DECLARED,
    SPLIT_TILES,
    TILES_OF_AVX512,
    TILES_OF_OTHERS,
    Tiles,
    product_text,
)
from ingot.kernels.cpu.rows_text import MOST_SPLIT, ROWS_DECLARED, rows_text


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight [N, K] in panels.

    Attributes:
        packing: what the values are.
        values: uint8 [ceil(N / 16), K / 8, bytes of a step].
        scales: fp32 [groups, 16 · ceil(N / 16)]; with ``rounds`` [1, …], unless rows are split.
        zeros: uint8 [groups, …], of ``packing.zeros``.
        inner: uint8 [groups, …], of int4 with ``rounds``.
        bias: fp32 [16 · ceil(N / 16)], zeros where there is none.
        out_features: N.
        group: columns of a group; K where there is one.
        row_group: of ``packing.by_group``: columns of a row that share a scale, a divisor of ``group``.
        input_scale: fp32 [1] of rows whose scale calibration found.
    """

    packing: PanelPacking
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    inner: torch.Tensor | None
    bias: torch.Tensor
    out_features: int
    group: int
    row_group: int = 0
    input_scale: torch.Tensor | None = None

    @property
    def row_groups(self) -> int:
        """Groups of columns that a kernel adds up."""
        return self.in_features // (self.row_group or self.group)

    @property
    def in_features(self) -> int:
        return self.values.shape[1] * STEP

    @property
    def nbytes(self) -> int:
        tensors = (self.values, self.scales, self.zeros, self.inner, self.bias)
        return sum(0 if tensor is None else tensor.nbytes for tensor in tensors)


def tiles(packing: PanelPacking) -> Tiles:
    cpu = host_cpu()
    if packing.split:
        return SPLIT_TILES
    return TILES_OF_AVX512 if cpu is not None and cpu.avx512 else TILES_OF_OTHERS


def split_group(group: int) -> int:
    """The largest share of a weight's group that split rows may have a scale for."""
    return max(size for size in range(STEP, MOST_SPLIT + 1, STEP) if group % size == 0)


@cache
def _kernel(packing: PanelPacking) -> Launch:
    cpu = host_cpu()
    assert cpu is not None
    text = [product_text(packing, tiles(packing), "kernel", permutes=cpu.avx512), *PRODUCT_DECLARED]
    if not packing.rounds:
        return compiled("\n".join(text))
    text += [rows_text(packing, "rows"), *ROWS_DECLARED, barrier_text(), _BOTH]
    return compiled("\n".join(text), "both")


_BOTH = f"""define void @both(ptr %args, i64 %thread, i64 %threads) {{
  call void @rows(ptr %args, i64 %thread, i64 %threads)
  %met = getelementptr i8, ptr %args, i64 {8 * len(ARGUMENTS) + 8}
  call void @meet(ptr %met, i64 %threads)
  call void @kernel(ptr %args, i64 %thread, i64 %threads)
  ret void
}}"""


def _rows_of_tile(rows: int, packing: PanelPacking) -> int:
    own = tiles(packing)
    return next((count for count in own if rows <= count), max(own))


def _in_panels(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[M, K] → [ceil(M / rows), K, rows], filled up with zeros."""
    if rows == 1:
        return x.contiguous()
    if missing := -len(x) % rows:
        x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
    return x.view(-1, rows, x.shape[1]).transpose(1, 2).contiguous()


def panel_product(x: torch.Tensor, panels: Panels, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x · Wᵀ + bias (+ residual), x fp32 [M, K] → [M, N].

    Floats: each output adds its columns in order, in fp32. With ``packing.rounds`` rows are quantized first;
    exact sums are scaled in fp32 by the rows' scales, then by the weight's.
    """
    count, packing = len(x), panels.packing
    if count == 0:  # of a step that wants no logits; the kernel's loops run once at least
        return torch.empty(0, panels.out_features)
    rows = _rows_of_tile(count, packing)
    number = -(-count // rows)
    own = x.contiguous() if packing.rounds else _in_panels(x, rows)
    y = torch.empty(number * rows, LANES * len(panels.values))
    fits = residual is not None and residual.shape == y.shape and residual.is_contiguous()
    quantized = RowsBuffer.of([panels], number * rows) if packing.rounds else None
    arguments = product_arguments(
        own, panels, residual if fits else None, y, quantized, count=count, rows=rows
    )
    _kernel(packing)([*arguments, *[0] * BARRIER_WORDS], torch.get_num_threads())
    if y.shape != (count, panels.out_features):
        y = y[:count, : panels.out_features].contiguous()
    return y if residual is None or fits else y.add_(residual)


@dataclass(frozen=True, eq=False)
class RowsBuffer:
    """Where a kernel writes quantized rows: values, sums of groups, scales."""

    values: torch.Tensor
    sums: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, panels: Sequence[Panels], rows: int) -> RowsBuffer:
        """For the largest of these weights."""
        groups = rows * max(one.row_groups for one in panels)
        return cls(
            torch.empty(rows * max(one.in_features * one.packing.parts for one in panels), dtype=torch.int8),
            torch.empty(2 * groups, dtype=torch.int32),
            torch.empty(groups),
        )


def product_arguments(
    x: torch.Tensor,
    panels: Panels,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    quantized: RowsBuffer | None = None,
    *,
    count: int = 1,
    rows: int = 1,
    in_panels: torch.Tensor | None = None,
) -> list[int]:
    """Words of the kernel of a product of ``count`` rows by tiles of ``rows``. x lies in panels, or with
    ``quantized`` or a buffer ``in_panels`` as it is; residual and y have whole vectors. The tensors must
    outlive the words.
    """
    source, values, sums, scales = x, x if in_panels is None else in_panels, None, None
    if quantized is not None:
        values, sums, scales = quantized.values, quantized.sums, quantized.scales
    own = (panels.values, panels.scales, panels.zeros, panels.inner, panels.bias)
    first = [_address(one) for one in (values, *own, residual, y)]
    groups, fine = panels.row_groups, panels.group // (panels.row_group or panels.group)
    steps = panels.in_features // STEP // groups
    sizes = [len(panels.values), -(-count // rows), groups, steps]
    beside = [_address(sums), _address(scales), fine, _address(source), count, _address(panels.input_scale)]
    arguments = [*first, *sizes, *beside, rows]
    assert len(arguments) == len(ARGUMENTS) + 1
    return arguments


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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


def panel_bytes(packing: PanelPacking, out_features: int, in_features: int) -> int:
    """Bytes of ``Panels.values``."""
    return -(-out_features // LANES) * (in_features // STEP) * STEP_BYTES[packing.values]
