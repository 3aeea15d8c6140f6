"""How GPTQ, AWQ and compressed-tensors store the quantized values of a linear layer.

W [N, K] = (q - zero) · scale. Words are int32 of P = 32 / bits values, the first in the lowest bits:

- GPTQ (AutoGPTQ 0.8, ``qlinear_cuda.py``): ``qweight`` [K / P, N] along K; ``qzeros`` [groups, N / P] along
  N, less 1 in the format ``gptq``; ``scales`` [groups, N]; ``g_idx`` [K]: the group of each column.
- AWQ (AutoAWQ 0.2, ``WQLinear_GEMM``): ``qweight`` [K, N / 8] and ``qzeros`` [groups, N / 8] along N, whose
  value i of a word is that of output 8 · word + (0, 2, 4, 6, 1, 3, 5, 7)[i]; ``scales`` [groups, N].
- compressed-tensors 0.20, pack-quantized: ``weight_packed`` [N, ⌈K / P⌉] along K, ``weight_zero_point``
  [⌈N / P⌉, groups] along N, both with the middle added; ``weight_scale`` [N, groups], [N, 1] or [1];
  ``weight_shape`` (N, K); ``weight_g_idx`` [K]. int-quantized: ``weight`` int8 [N, K], and of static
  activations ``input_scale`` [1]. float-quantized: ``weight`` e4m3 [N, K], in blocks of R x C values
  ``weight_scale`` [⌈N / R⌉, ⌈K / C⌉].
- fp8 (transformers 5.23, ``FP8Linear``): the same in blocks, with ``weight_scale_inv`` in the place of
  ``weight_scale``; checkpoint_reader.py renames it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ingot.checkpoint.packed_config import FROM_ORIGINAL, PackedFormat
from ingot.device import dtype_name
from ingot.errors import CheckpointError

E4M3 = torch.float8_e4m3fn
WORD_BITS = 32
AGAIN = "download config.json and weights of one revision again"
_NEAR = 0.25  # scales: no layer's values are as far from 0 on average, and of 1,024 values chance moves half
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SUFFIXES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    ),
}
_WHOLE = ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point")
_OPTIONAL = frozenset({"g_idx", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"})

Pieces = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in few bits: (values - zeros) · scales.

    Attributes:
        values: uint8 [N, K], or e4m3.
        scales: [N], or [groups, N], as the checkpoint has them.
        zeros: uint8 of the same shape; None: the middle of the values' range, of e4m3 0.
        order: int32 [K] where groups are of columns that are not neighbours: column j of ``values`` is the
            weight's column ``order[j]``; None: by column.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    order: torch.Tensor | None = None

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """W [N, K] in its own order of columns, computed in fp32."""

        def beside(part: torch.Tensor) -> torch.Tensor:
            if part.dim() == 2:
                return part.repeat_interleave(self.group, 0)[: self.values.shape[1]].T
            return part[:, None] if part.dim() == 1 else part

        middle = 0 if self.values.is_floating_point() else 1 << (self.bits - 1)
        zeros = torch.tensor(middle) if self.zeros is None else self.zeros
        wide = (self.values.float() - beside(zeros.float())) * beside(self.scales.float())
        return (wide if self.order is None else wide[:, self.order.long().argsort()]).to(dtype)


def suffixes(packed: PackedFormat) -> tuple[str, ...]:
    """Last parts of the names of a packed layer's tensors; a packed layer always has the first."""
    return _WHOLE if packed.whole_bytes else _SUFFIXES[packed.source]


def missing(packed: PackedFormat, names: set[str]) -> list[str]:
    """What a layer with pieces of these last parts lacks."""
    needed = set(suffixes(packed)) - _OPTIONAL
    if packed.source == "compressed-tensors" and not packed.symmetric:
        needed.add("weight_zero_point")
    if packed.act_order:
        needed.add("g_idx" if packed.source == "gptq" else "weight_g_idx")
    if packed.activations == "static":
        needed.add("input_scale")
    return sorted(needed - names)


def unpack(packed: PackedFormat, pieces: Pieces) -> PackedWeight:
    """The quantized values of one layer; CheckpointError where shapes or values contradict the config."""
    read = _compressed if packed.whole_bytes or packed.source == "compressed-tensors" else _gptq
    values, scales, zeros, index = read(packed, pieces)
    expect_floating(scales)
    if zeros is not None:
        if packed.source == "gptq":
            _check_zeros(packed, values, zeros)
        zeros = None if packed.symmetric else zeros
    rows, columns = values.shape
    group = packed.tiles[1] if packed.tiles else packed.group
    groups = -(-columns // group) if group else 1
    for name, part in (("scales", scales), ("zeros", zeros)):
        if part is not None and part.shape != (groups, rows):
            raise CheckpointError(
                f"{name} do not fit the quantized values", seen=list(part.shape), allowed=[groups, rows]
            )
    order = _order(packed, index, columns)
    if order is not None:
        values = values[:, order.long()]
    if not group:
        scales, zeros = scales[0], None if zeros is None else zeros[0]
    zeros = None if zeros is None else zeros.contiguous()
    found = PackedWeight(values.contiguous(), scales.contiguous(), zeros, packed.bits, group, order)
    _check_scales(packed, found)
    return found


def expect_floating(scales: torch.Tensor) -> None:
    """CheckpointError for scales that are integers, or in 8 bits."""
    if not scales.is_floating_point() or scales.itemsize < 2:
        seen = dtype_name(scales.dtype)
        raise CheckpointError("the scales are in another dtype", seen=seen, allowed="fp32, bf16 or fp16")


def expect_positive(scales: torch.Tensor) -> None:
    """CheckpointError for fp8's scales below 0; those of few bits may be: GGUF and AutoRound write such."""
    if bool((scales < 0).any()):
        seen = f"least {float(scales.min()):.3g}"
        raise CheckpointError("scales are negative", seen=seen, allowed="scales above 0", fix=AGAIN)


def lost_values(count: int) -> CheckpointError:
    """``count`` values whose scale is 0: part of a file was not written, or is of another one."""
    what = "scales are 0 beside values that are not"
    return CheckpointError(what, seen=f"{count} values lost", allowed="scales above 0", fix=AGAIN)


def _check_scales(packed: PackedFormat, weight: PackedWeight) -> None:
    """Refuse scales below 0 of fp8, and those of 0 that lose values: any of fp8, all of a layer of few bits
    (the least scales of fp16 may have become 0).
    """
    if packed.floating:
        expect_positive(weight.scales)
    lost = weight.scales == 0
    if bool(lost.any()) and (packed.floating or bool(lost.all())):
        beside = replace(weight, scales=lost.float()).dequantized(torch.float32)
        if count := int(beside.count_nonzero()):
            raise lost_values(count)


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _gptq(packed: PackedFormat, pieces: Pieces) -> Parts:
    """Values [N, K], scales and zeros [groups, N] and the groups of columns, of GPTQ and AWQ."""
    if packed.source == "awq":
        values, zeros = _awq_words(pieces["qweight"]).T, _awq_words(pieces["qzeros"])
    else:
        values, zeros = _words(pieces["qweight"].T, packed.bits), _words(pieces["qzeros"], packed.bits)
    stored = zeros[:, : values.shape[0]].to(torch.int16) + packed.stored_zero
    if (highest := int(stored.max())) > 255:
        fix = "download the checkpoint again"
        raise CheckpointError("a zero point is out of range", seen=highest, allowed="0 to 255", fix=fix)
    return values, pieces["scales"], stored.to(torch.uint8), pieces.get("g_idx")


def _compressed(packed: PackedFormat, pieces: Pieces) -> Parts:
    """The same of compressed-tensors, whose values and zeros are stored around 0."""
    middle = 1 << (packed.bits - 1)
    kind = E4M3 if packed.floating else torch.int8
    if packed.whole_bytes and pieces["weight"].dtype != kind and packed.source != "gguf":
        raise CheckpointError(
            "the weight is in another dtype than the quantization config says",
            seen=pieces["weight"].dtype,
            allowed=kind,
            fix=AGAIN,
        )
    if packed.floating:
        values = pieces["weight"]
    elif packed.whole_bytes:
        values = (pieces["weight"].to(torch.int16) + middle).to(torch.uint8)
    else:
        rows, columns = (int(size) for size in pieces["weight_shape"].tolist())
        values = _words(pieces["weight_packed"], packed.bits)[:rows, :columns]
    rows = values.shape[0]
    scales = pieces["weight_scale"]
    if packed.tiles is not None:
        return values, _of_tiles(scales, values, packed.tiles), None, None
    scales = _by_groups("scales", scales, rows)
    zeros = pieces.get("weight_zero_point")
    if packed.symmetric:
        _check_no_zeros(packed, zeros)
        return values, scales, None, pieces.get("weight_g_idx")
    assert zeros is not None
    if zeros.dtype == torch.int32:
        zeros = _words(zeros.T, packed.bits)[:, :rows]
    else:  # int8, as it was before zeros were packed, and as whole bytes still have it
        zeros = _by_groups("zeros", (zeros.to(torch.int16) + middle).to(torch.uint8), rows)
    return values, scales, zeros, pieces.get("weight_g_idx")


def _by_groups(name: str, part: torch.Tensor, rows: int) -> torch.Tensor:
    """[groups, N] of what is stored as [N, groups], or in any shape as one per row or one of all."""
    if part.numel() == 1:
        return part.reshape(1, 1).expand(1, rows)
    if part.numel() != rows and (part.dim() != 2 or part.shape[0] != rows):
        what = f"the {name} do not fit the quantized values"
        raise CheckpointError(what, seen=list(part.shape), allowed=f"[{rows}, groups]", fix=AGAIN)
    return part.reshape(rows, -1).T


def _of_tiles(scales: torch.Tensor, values: torch.Tensor, tiles: tuple[int, int]) -> torch.Tensor:
    """Scales [groups, N] of blocks; CheckpointError where there are others than values [N, K] have."""
    blocks = [-(-size // tile) for size, tile in zip(values.shape, tiles, strict=True)]
    if list(scales.shape) != blocks or not scales.is_floating_point() or scales.itemsize < 2:
        raise CheckpointError(
            "the scales do not fit the blocks of the weight",
            seen=f"{list(scales.shape)} {dtype_name(scales.dtype)} for a weight {list(values.shape)}",
            allowed=f"{blocks} of fp32, bf16 or fp16, one for each block of {list(tiles)}",
            fix=AGAIN,
        )
    return scales.T.repeat_interleave(tiles[0], 1)[:, : len(values)]


def _check_no_zeros(packed: PackedFormat, zeros: torch.Tensor | None) -> None:
    """Refuse zeros of symmetric weights of compressed-tensors, unless all are 0 (or, packed, the middle)."""
    if zeros is None or not bool(zeros.any()):
        return
    if zeros.dtype != torch.int32 or bool((_words(zeros, packed.bits) != 1 << (packed.bits - 1)).any()):
        raise CheckpointError(
            "the quantization config says symmetric, but zero points are not 0",
            seen=f"weight_zero_point {int(zeros.min())} to {int(zeros.max())}",
            allowed=0,
            fix=f"download config.json and weights of one revision again, or {FROM_ORIGINAL}",
        )


def _words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The values of int32 words along the last dimension, uint8."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    values = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2).to(torch.uint8)


def _awq_words(words: torch.Tensor) -> torch.Tensor:
    """The same in AWQ's order of outputs."""
    places = torch.tensor(_AWQ_ORDER).argsort()
    return _words(words, 4).unflatten(-1, (-1, len(_AWQ_ORDER)))[..., places].flatten(-2)


def _check_zeros(packed: PackedFormat, values: torch.Tensor, zeros: torch.Tensor) -> None:
    """Refuse zeros of GPTQ [groups, N] that were stored in the other layout, or contradict ``sym``.

    The layout gptq stores zeros less 1 and gptq_v2 as they are. Read as the other one, symmetric zeros are
    all 1 beside the middle, and values of 4 bits are 1 off 0 on average, where a layer's weights are
    around 0. (In 8 bits one scale is as small as a layer's own average.) A cure is named where the tensors
    show that it is one.
    """
    middle = 1 << (packed.bits - 1)
    beside, other = (1, "gptq_v2") if packed.stored_zero else (-1, "gptq")
    low, high = int(zeros.min()), int(zeros.max())
    # How many scales the values are from their zeros on average.
    mean = float(values.sum(dtype=torch.int64)) / values.numel() - float(zeros.double().mean())
    shifted = not packed.symmetric and packed.bits == 4 and abs(mean + beside) < _NEAR
    if low == high == middle + beside or shifted:
        raise CheckpointError(
            f"the zero points are those of the layout {other}, and the quantization config names another",
            seen=f"zeros {low} to {high}, quantized values {mean:+.2f} steps from zero on average",
            allowed=f"values around zero, zeros {middle} if symmetric",
            fix=f'"checkpoint_format": "{other}" in the checkpoint\'s quantization config (the same in '
            '"format" and in quantize_config.json, where they are there)',
        )
    if packed.symmetric and (low, high) != (middle, middle):
        around = packed.bits == 4 and abs(mean) < _NEAR
        raise CheckpointError(
            "the quantization config says symmetric, but zero points are not in the middle",
            seen=f"{low} to {high}",
            allowed=middle,
            fix='"sym": false in the checkpoint\'s quantization config'
            if around
            else "download config.json and weights of one revision again; whether the config's sym or its "
            f"layout is wrong cannot be seen from the tensors. Or {FROM_ORIGINAL}",
        )


def _order(packed: PackedFormat, index: torch.Tensor | None, columns: int) -> torch.Tensor | None:
    """The columns by their groups, where the format has an order.

    Raises CheckpointError where groups are of unequal size, or out of order without ``desc_act``.
    """
    if index is None or not packed.group:
        return None
    expected = torch.arange(columns) // packed.group
    order = index.long().argsort(stable=True)
    if index.shape != (columns,) or not torch.equal(index.long()[order], expected):
        raise CheckpointError(
            "columns are not in groups of equal size",
            seen=f"g_idx {list(index.shape)}, {int(index.min())} to {int(index.max())}",
            allowed=f"{columns} columns in groups of {packed.group}",
        )
    if packed.act_order:
        return order.to(torch.int32)
    if not torch.equal(index.long(), expected):
        raise CheckpointError(
            "g_idx is out of order, but config.json says that columns are in order",
            fix="desc_act (actorder) in the checkpoint's quantization config",
        )
    return None
