"""The packed layers of a checkpoint, presented to weight maps as if their weights were stored whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ingot.checkpoint.checkpoint_files import shorten
from ingot.checkpoint.fp8_weights import fp8_names, half_of
from ingot.checkpoint.packed_config import PackedFormat
from ingot.checkpoint.packed_layouts import AGAIN, WORD_BITS, PackedWeight, missing, suffixes, unpack
from ingot.checkpoint.shard_reader import TensorInfo
from ingot.errors import CheckpointError

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class PackedLayers:
    """The packed layers of a checkpoint and all its tensors.

    Attributes:
        tensors: name to shape, dtype (of a packed weight: that of its scales) and file; ``x.qweight`` and its
            kin are ``x.weight`` of the shape that a model wants.
        names: of the weights that are packed.
    """

    form: PackedFormat
    tensors: dict[str, TensorInfo]
    names: frozenset[str]
    _stored: Mapping[str, TensorInfo] = field(repr=False)
    _read: Read = field(repr=False)

    @classmethod
    def of(cls, form: PackedFormat, stored: Mapping[str, TensorInfo], read: Read) -> PackedLayers:
        """Find the packed layers among ``stored``; CheckpointError for none, or one that lacks a tensor."""
        if form.floating:
            fp8_names(stored)
        first, *others = suffixes(form)
        modules = {
            name.removesuffix(f".{first}"): info
            for name, info in stored.items()
            if name.endswith(f".{first}") and (not form.whole_bytes or f"{name}_scale" in stored)
        }
        if not modules:
            raise CheckpointError(
                f"config.json says {form.source}, but no layer is quantized",
                seen=shorten(list(stored)),
                allowed=f"tensors named *.{first}",
                fix="download the checkpoint again, with config.json and weights of one revision",
            )
        lacks = [
            f"{module}.{part}"
            for module in modules
            for part in missing(form, {end for end in (first, *others) if f"{module}.{end}" in stored})
        ]
        lacks += [
            f"{name}_scale"
            for name, info in stored.items()
            if form.whole_bytes and info.dtype == torch.int8 and f"{name}_scale" not in stored
            if name.endswith(f".{first}")
        ]
        if lacks:
            raise CheckpointError(
                f"quantized layers lack tensors ({len(lacks)})",
                seen=shorten(lacks),
                fix="download the checkpoint again: its quantization config may belong to another one",
            )
        tensors: dict[str, TensorInfo] = {}
        idle = {f"{module}.{end}" for module in modules for end in others}
        half = half_of({name: info for name, info in stored.items() if name not in idle})
        by_weight = form.whole_bytes or form.source == "compressed-tensors"
        scales = "weight_scale" if by_weight else "scales"
        for name, info in stored.items():
            module = name.removesuffix(f".{first}")
            if module != name and module in modules:
                dtype = stored[f"{module}.{scales}"].dtype
                shape = _shape(form, module, info, read)
                # What is dequantized for another scheme is rounded once.
                wide, default = (torch.float32, dtype) if form.replaceable else (dtype, None)
                default = half if form.floating else default
                tensors[f"{module}.weight"] = TensorInfo(shape, wide, info.file, default)
            elif name not in idle:
                tensors[name] = info
        return cls(form, tensors, frozenset(f"{module}.weight" for module in modules), stored, read)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def weight(self, name: str) -> PackedWeight:
        """The quantized values of a packed weight; CheckpointError, as ``unpack``, with the layer's name."""
        module = name.removesuffix(".weight")
        ends = [end for end in suffixes(self.form) if f"{module}.{end}" in self._stored]
        pieces = {end: self._read(f"{module}.{end}") for end in ends}
        try:
            return unpack(self.form, pieces)
        except CheckpointError as error:
            what = f"{module}: {error.what}, in {self._stored[f'{module}.{ends[0]}'].file}"
            raise CheckpointError(what, seen=error.seen, allowed=error.allowed, fix=error.fix) from None

    def input_scale(self, name: str) -> torch.Tensor | None:
        """fp32 [1] of a static input, else None. Raises CheckpointError where the input's zero is not 0, or
        the scale is not one number above 0.
        """
        if self.form.activations != "static":
            return None
        module = name.removesuffix(".weight")
        zero = f"{module}.input_zero_point"
        if zero in self._stored and bool(self._read(zero).any()):
            raise CheckpointError(
                f"{module}: the input's zero point is not 0", seen=zero, fix="download the checkpoint again"
            )
        name = f"{module}.input_scale"
        scale = self._read(name)
        if scale.numel() != 1 or not scale.is_floating_point() or float(scale) <= 0:
            what = f"{name} is not one number above 0, in {self._stored[name].file}"
            seen = scale.tolist() if scale.numel() == 1 else f"shape {list(scale.shape)}"
            raise CheckpointError(what, seen=seen, fix=AGAIN)
        return scale.float().reshape(1)

    def idle_biases(self) -> list[str]:
        """Biases of packed layers that are all 0: some tools write one for every layer, needed or not."""
        names = [f"{name.removesuffix('.weight')}.bias" for name in sorted(self.names)]
        return [name for name in names if name in self._stored and not bool(self._read(name).any())]


def _shape(form: PackedFormat, module: str, info: TensorInfo, read: Read) -> tuple[int, ...]:
    """(N, K) of a packed layer by its first tensor."""
    per_word = WORD_BITS // form.bits
    if form.source == "awq":
        return info.shape[1] * per_word, info.shape[0]
    if form.source == "gptq":
        return info.shape[1], info.shape[0] * per_word
    if form.whole_bytes:
        return info.shape
    return tuple(int(size) for size in read(f"{module}.weight_shape").tolist())
