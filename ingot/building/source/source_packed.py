"""What the packed layers of a GPTQ, AWQ or compressed-tensors checkpoint mean, one value at a time by index.

This second reading of the layouts shares nothing with the first (checkpoint/packed_layouts.py), by which
builds take values over. What config.json says of bits, groups and symmetry is packed_config.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.checkpoint.checkpoint_files import CONFIG, read_json
from ingot.checkpoint.packed_config import PACKED_KEYS, packed_files, packed_format

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # output 8 w + i is nibble _AWQ_PLACES[i] of word w
ENDS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        *("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        "input_scale",
    ),
    "fp8": ("weight", "weight_scale_inv", "input_scale"),
}
_FIRST = {"gptq": ("qweight",), "awq": ("qweight",), "compressed-tensors": ("weight_packed", "weight_scale"),
          "fp8": ("weight_scale_inv",)}  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """What config.json says of the layout.

    Attributes:
        kind: ``gptq``, ``awq``, ``compressed-tensors`` or ``fp8``.
        group: columns of a scale where no tensor says which column has which; 0: all.
        less: how much smaller than a zero its stored value is.
        symmetric: zeros are in the middle, whatever is stored.
        tiles: rows and columns that share a scale, of fp8 in blocks.
    """

    kind: str
    bits: int
    group: int
    less: int
    symmetric: bool
    tiles: tuple[int, int] | None = None

    @classmethod
    def of(cls, folder: Path, names: Collection[str]) -> Packing | None:
        """Of a checkpoint's config.json and the files beside it; None: no layer is packed."""
        config, beside = read_json(folder / CONFIG), packed_files(folder, names)
        form = packed_format(config, beside)
        if form is None:
            return None
        formats = [config.get(key) for key in PACKED_KEYS] + list(beside.values())
        layouts = {
            str(one.get(key)).lower() for one in formats if one for key in ("checkpoint_format", "format")
        }
        less = int(form.source == "gptq" and "gptq_v2" not in layouts)
        return cls(form.source, form.bits, form.group, less, form.symmetric, form.tiles)

    def packs(self, module: str, names: Mapping[str, object]) -> bool:
        """Whether a module of a checkpoint with these names is packed."""
        return any(f"{module}.{end}" in names for end in _FIRST[self.kind])


def meant(form: Packing, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """W [N, K] = (q - zero) · scale, fp32."""
    if form.tiles is not None:
        row, column = (torch.arange(size) for size in pieces["weight"].shape)
        own = pieces["weight_scale_inv" if form.kind == "fp8" else "weight_scale"]
        scales = own[row // form.tiles[0]][:, column // form.tiles[1]]
        return pieces["weight"].float() * scales.float()
    if form.kind == "compressed-tensors":
        values, zeros, scales, index = _compressed(form, pieces)
    else:
        values, zeros, scales, index = _of_words(form, pieces)
    groups = _groups(form, values.shape[1], scales.shape[1], index)
    return (values - zeros[:, groups]) * scales.float()[:, groups]


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _of_words(form: Packing, pieces: Mapping[str, torch.Tensor]) -> Parts:
    """q [N, K] fp32, zeros and scales [N, groups], and the group of each column, of GPTQ and AWQ."""
    words, zeros, scales = (pieces[end] for end in ("qweight", "qzeros", "scales"))
    outputs = torch.arange(scales.shape[1])
    per = 32 // form.bits
    if form.kind == "awq":
        shifts = 4 * torch.tensor(_AWQ_PLACES)[outputs % 8]
        values = _bits(words[:, outputs // 8], shifts, 4).T
        own = _bits(zeros[:, outputs // 8], shifts, 4).T
        return values, own, scales.T, None
    columns = torch.arange(words.shape[0] * per)
    values = _bits(words[columns // per], (form.bits * (columns % per))[:, None], form.bits).T
    own = _bits(zeros[:, outputs // per], form.bits * (outputs % per), form.bits).T + form.less
    middle = torch.full_like(own, 1 << form.bits - 1)
    return values, middle if form.symmetric else own, scales.T, pieces.get("g_idx")


def _compressed(form: Packing, pieces: Mapping[str, torch.Tensor]) -> Parts:
    """The same of compressed-tensors; values and zeros around 0."""
    middle, per = 1 << form.bits - 1, 32 // form.bits
    if "weight_packed" in pieces:
        rows, columns = (int(size) for size in pieces["weight_shape"].tolist())
        place = torch.arange(columns)
        words = pieces["weight_packed"][:rows, place // per]
        values = _bits(words, form.bits * (place % per), form.bits) - middle
    else:
        values = pieces["weight"].float()
        rows = len(values)
    scales = pieces["weight_scale"].reshape(-1)
    scales = scales.expand(rows)[:, None] if len(scales) == 1 else scales.view(rows, -1)
    zeros = torch.zeros(scales.shape)
    stored = pieces.get("weight_zero_point")
    if stored is not None and not form.symmetric:
        if stored.dtype == torch.int32:
            row = torch.arange(rows)
            packed = stored.view(-1, scales.shape[1])[row // per]
            zeros = _bits(packed, (form.bits * (row % per))[:, None], form.bits) - middle
        else:
            zeros = stored.float().reshape(-1).expand(rows)[:, None] if stored.numel() == 1 else stored
            zeros = zeros.float().view(rows, -1)
    return values, zeros, scales, pieces.get("weight_g_idx")


def _bits(words: torch.Tensor, shifts: torch.Tensor, bits: int) -> torch.Tensor:
    return ((words >> shifts.to(torch.int32)) & (1 << bits) - 1).float()


def _groups(form: Packing, columns: int, count: int, index: torch.Tensor | None) -> torch.Tensor:
    if index is not None and count > 1:
        return index.long()
    return torch.arange(columns) // form.group if form.group and count > 1 else torch.zeros(columns).long()
