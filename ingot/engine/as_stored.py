"""A checkpoint that somebody else quantized: its values are an engine's values.

Covers the way from packed layers to a QuantConfig, and their values, scales and zeros in the engine's form:
taken over, never chosen again.

    quant = stored_quant(packed, mapped, given)
    found = StoredWeights(packed, mapped, dtype).values("layers.0.mlp.down_proj")
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.checkpoint.name_rules import Concat, Rename, Transpose
from ingot.checkpoint.packed_config import FROM_ORIGINAL
from ingot.checkpoint.packed_layouts import PackedWeight
from ingot.checkpoint.packed_tensors import PackedLayers
from ingot.checkpoint.weight_map import MappedTensor
from ingot.config.quantization.quant_config import HEAD, SOURCES, QuantConfig
from ingot.device import dtype_name
from ingot.errors import BuildError, CheckpointError, ConfigError
from ingot.quant.quantized_values import Quantized

Mapped = Mapping[str, MappedTensor]


def stored_quant(
    packed: PackedLayers, mapped: Mapped, linear_names: list[str], given: QuantConfig
) -> QuantConfig:
    """The config of an engine of packed layers.

    Args:
        mapped: the model's tensors by name.
        linear_names: of its linear layers.
        given: what was asked for: nothing, the same again, or only a head in fewer bits.

    Raises:
        ConfigError: ``given`` is something else.
        CheckpointError: packed layers that the model cannot hold so: the head, or a part of a layer.
    """
    dense: dict[str, str] = {}
    for name in linear_names:
        sources = mapped[f"{name}.weight"].sources
        held = [source for source in sources if source in packed]
        if held and (name == HEAD or len(held) != len(sources)):
            what = "a quantized lm_head" if name == HEAD else "a layer with quantized and unquantized parts"
            raise CheckpointError(f"{what} is not supported", seen=sources, fix=FROM_ORIGINAL)
        if not held and name != HEAD:
            dense[name] = "none"
    return expect_stored(packed.form.quant(dense), given)


def expect_stored(found: QuantConfig, given: QuantConfig) -> QuantConfig:
    """What a build of a quantized checkpoint, ``found``, makes of ``given``: the same, or the head in fewer
    bits.

    Raises:
        ConfigError: ``given`` is something else.
    """
    if given == found.replace(head=given.head) or given == QuantConfig(head=given.head):
        return found.replace(head=given.head)
    raise ConfigError(
        f"the checkpoint is already quantized ({SOURCES[found.source]})",
        seen=given.summary,
        allowed=found.summary,
        field="quant",
        fix=f"leave out `quant`, or {FROM_ORIGINAL}",
    )


class StoredWeights:
    """The values and input scales of a packed checkpoint's layers, by the model's names."""

    def __init__(self, packed: PackedLayers, mapped: Mapped, dtype: torch.dtype) -> None:
        """``dtype``: the engine's, which must hold the scales as they are."""
        self._packed = packed
        self._mapped = mapped
        self._dtype = dtype

    def input_scale(self, name: str) -> torch.Tensor | None:
        """fp32 [1], the scale of a layer's input; None: its activations have no static scale.

        Raises:
            CheckpointError: the parts of a layer have scales that differ.
        """
        sources = self._mapped[f"{name}.weight"].sources
        scales = [self._packed.input_scale(source) for source in sources if source in self._packed]
        found = [scale for scale in scales if scale is not None]
        if any(not torch.equal(one, found[0]) for one in found):
            raise CheckpointError(
                f"{name} is one matmul, but its parts have different input scales",
                seen=[float(one) for one in found],
                fix=FROM_ORIGINAL,
            )
        return found[0] if found else None

    def values(self, name: str) -> Quantized | None:
        """Of a linear layer; None: it is whole. Rows of several sources lie one after another.

        Raises:
            CheckpointError: the values cannot be read, or parts of a layer have other orders of columns.
            BuildError: the engine's dtype does not hold the scales.
        """
        mapped = self._mapped[f"{name}.weight"]
        if mapped.tied_to is not None or not all(source in self._packed for source in mapped.sources):
            return None
        rule = mapped.rule
        joined = isinstance(rule, Concat) and rule.dim == 0
        if not joined and (not isinstance(rule, Rename) or isinstance(rule, Transpose)):
            raise CheckpointError(
                "quantized checkpoints of this architecture are not supported",
                seen=mapped.sources,
                fix=FROM_ORIGINAL,
            )
        parts = [self._packed.weight(source) for source in mapped.sources]
        self._check_order(name, mapped.sources, parts)
        first = parts[0]
        along = 1 if first.group else 0
        scales = torch.cat([part.scales for part in parts], along)
        zeros = (
            None
            if first.zeros is None
            else torch.cat([part.zeros for part in parts if part.zeros is not None], along)
        )
        values = torch.cat([part.numbers for part in parts])
        if self._packed.form.activations != "none":
            around_zero = (values.to(torch.int16) - (1 << (first.bits - 1))).to(torch.int8)
            return Quantized(around_zero, scales.float(), None, first.bits, first.group)
        return Quantized(values, self._exact(name, scales), zeros, first.bits, first.group, first.order)

    def _check_order(self, name: str, sources: tuple[str, ...], parts: list[PackedWeight]) -> None:
        orders = [part.order for part in parts]
        first = orders[0]
        if any((one is None) != (first is None) for one in orders) or any(
            first is not None and one is not None and not torch.equal(one, first) for one in orders
        ):
            raise CheckpointError(
                f"{name} is one matmul, but its parts order their columns differently",
                seen=sources,
                fix=FROM_ORIGINAL,
            )

    def _exact(self, name: str, scales: torch.Tensor) -> torch.Tensor:
        cast = scales.to(self._dtype)
        if not torch.equal(cast.to(scales.dtype), scales):
            raise BuildError(
                f"the scales of {name} do not fit {dtype_name(self._dtype)}",
                seen=dtype_name(scales.dtype),
                fix=f"`dtype={dtype_name(scales.dtype)}`, or auto",
            )
        return cast
