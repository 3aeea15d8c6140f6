"""compressed-tensors' ``float-quantized``: layers in fp8 (e4m3), presented as the weights that they mean.

``x.weight`` e4m3 [N, K] times ``x.weight_scale`` [N, 1], [1], or one per block of rows and columns. A scale
of the input (``x.input_scale``) is left out: inputs keep the engine's dtype. Layers whose inputs have a scale
per token are not here: packed_tensors.py keeps their values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch

from ingot.checkpoint.checkpoint_files import shorten
from ingot.checkpoint.packed_config import PackedFormat
from ingot.checkpoint.packed_layouts import expect_floating, expect_positive, lost_values
from ingot.checkpoint.shard_reader import TensorInfo
from ingot.errors import CheckpointError

_SCALE, _AGAIN = "_scale", "download the checkpoint again, with config.json and weights of one revision"
_FP8, _HALVES = torch.float8_e4m3fn, (torch.bfloat16, torch.float16)
Read = Callable[[str], torch.Tensor]


def fp8_names(stored: Mapping[str, TensorInfo]) -> frozenset[str]:
    """The weights in fp8; CheckpointError for none, or one without its scale."""
    names = frozenset(name for name, info in stored.items() if info.dtype == _FP8)
    lacks = [f"{name}{_SCALE} (or {_SCALE}_inv)" for name in sorted(names) if name + _SCALE not in stored]
    if lacks or not names:
        what = f"fp8 weights lack their scales ({len(lacks)})" if lacks else "no weight is in fp8 (e4m3)"
        raise CheckpointError(what, seen=shorten(lacks or list(stored)), fix=_AGAIN)
    return names


def half_of(tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The 16-bit dtype of most tensors, else bf16: what an engine of fp8 weights stores the others in."""
    halves = Counter(info.dtype for info in tensors.values() if info.dtype in _HALVES)
    return halves.most_common(1)[0][0] if halves else torch.bfloat16


def scale_names(stored: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The names of ``fp8`` checkpoints' scales → those of compressed-tensors; CheckpointError for both."""
    inverse = f"weight{_SCALE}_inv"
    names = {name: name.removesuffix("_inv") for name in stored if name.endswith(f".{inverse}")}
    both = [name for name, other in names.items() if other in stored]
    if both:
        what = f"weights have two scales, {inverse} and weight{_SCALE} ({len(both)})"
        raise CheckpointError(what, seen=shorten(both), fix=_AGAIN)
    return names


class Fp8Weights:
    """A checkpoint's tensors with the fp8 ones dequantized to fp32.

    Attributes:
        tensors: name to shape and dtype, scales left out; an engine stores the weights in the 16-bit dtype of
            most other tensors, else bf16.
        names: of the weights in fp8.
    """

    def __init__(self, form: PackedFormat, stored: Mapping[str, TensorInfo], read: Read) -> None:
        self._form = form
        self._read = read
        self.names = fp8_names(stored)
        idle = {f"{name}{_SCALE}" for name in self.names}
        idle |= {f"{name.removesuffix('weight')}input_scale" for name in self.names}
        self.tensors = {name: info for name, info in stored.items() if name not in idle}
        default = half_of(self.tensors)
        for name in self.names:
            info = stored[name]
            self.tensors[name] = TensorInfo(info.shape, torch.float32, info.file, default)

    def read(self, name: str) -> torch.Tensor:
        """A tensor as it is stored; of an fp8 weight what it means, fp32."""
        if name not in self.names:
            return self._read(name)
        values, scales = self._read(name).float(), self._read(name + _SCALE)
        try:
            return values * self._beside(values, scales)
        except CheckpointError as error:
            what = f"{name}: {error.what}, in {self.tensors[name].file}"
            raise CheckpointError(what, seen=error.seen, allowed=error.allowed, fix=_AGAIN) from None

    def _beside(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The scales as fp32 [N, K], [N, 1] or [1, 1]; CheckpointError for those of no weight."""
        expect_floating(scales)
        expect_positive(scales)
        rows, columns = values.shape
        tiles = self._form.tiles
        blocks = None if tiles is None else [-(-rows // tiles[0]), -(-columns // tiles[1])]
        if list(scales.shape) != blocks if blocks else scales.numel() not in (1, rows):
            allowed = [1, rows] if tiles is None else f"{blocks}, one per block of {list(tiles)}"
            what = "the scales do not fit the weight"
            raise CheckpointError(what, seen=list(scales.shape), allowed=allowed)
        if tiles is None:
            wide = scales.float().reshape(-1, 1)
        else:
            wide = scales.float().repeat_interleave(tiles[0], 0)[:rows]
            wide = wide.repeat_interleave(tiles[1], 1)[:, :columns]
        if not bool(scales.all()) and (count := int((values * (wide == 0)).count_nonzero())):
            raise lost_values(count)
        return wide
