"""Takes over an already quantized checkpoint: its QuantConfig, values, scales and zeros."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.checkpoint.gguf.gguf_weights import GGUF_TYPES
from ingot.checkpoint.name_rules import Concat, Rename, Transpose
from ingot.checkpoint.packed_config import FROM_ORIGINAL, PackedFormat
from ingot.checkpoint.packed_tensors import PackedLayers
from ingot.checkpoint.weight_map import MappedTensor
from ingot.config.half_dtypes import HalfDtypes
from ingot.config.quantization.quant_config import HEAD, REPLACEABLE, SOURCES, QuantConfig
from ingot.config.quantization.scheme_table import SCHEMES
from ingot.device import dtype_name, parse_dtype
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
        given: the requested config: none, the checkpoint's own, or only a head in fewer bits.

    Raises:
        ConfigError: ``given`` is something else.
        CheckpointError: the head, or only a part of a layer, is packed, and not in fp8, which is dequantized.
    """
    dense: dict[str, str] = {}
    for name in linear_names:
        sources = mapped[f"{name}.weight"].sources
        held = [source for source in sources if source in packed]
        whole = name != HEAD and len(held) == len(sources) and _joins(packed, sources)
        if held and not whole and not packed.form.floating:
            what = "a quantized lm_head" if name == HEAD else "a layer with quantized and unquantized parts"
            raise CheckpointError(f"{what} is not supported", seen=sources, fix=FROM_ORIGINAL)
        if not whole and name != HEAD:
            dense[name] = "none"
    return expect_stored(packed.form.quant(dense), given)


def _joins(packed: PackedLayers, sources: Sequence[str]) -> bool:
    """Whether a layer can keep the values of its parts: of blocks, whole ones lie beside each other."""
    if packed.form.tiles is None or not packed.form.kept:
        return True
    rows, columns = packed.form.tiles
    shapes = [packed.tensors[source].shape for source in sources]
    return all(shape[0] % rows == 0 for shape in shapes[:-1]) and shapes[0][1] % columns == 0


def replaces_stored(form: PackedFormat, given: QuantConfig) -> bool:
    """Whether a build with ``given`` dequantizes a checkpoint's values and chooses others."""
    return form.replaceable and not _as_it_is(form.quant(), given) and not given.source


def _as_it_is(found: QuantConfig, given: QuantConfig) -> bool:
    """Whether a build with ``given`` keeps a replaceable checkpoint's values; fp8's scheme and scales may be
    named.
    """
    same = [QuantConfig(head=given.head)]
    if SCHEMES[found.scheme].floating:
        same.append(QuantConfig(found.scheme, head=given.head, weight_scales=found.weight_scales))
    return given in same


def stored_note(checkpoint: Checkpoint, quant: QuantConfig, dtype: str) -> str | None:
    """What a build with ``quant`` does to the quantized tensors of GGUF and fp8; None: there are none.

    ``quant`` and ``dtype`` are the engine's own.
    """
    kept, widened = checkpoint.packed, Counter(checkpoint.widened)
    kind = "" if kept is None else _kind_of(kept.form)
    if kept is not None and not quant.source:
        widened[kind] += len(kept.names)
    parts = []
    if kept is not None and quant.source and kind:
        group = f", group {quant.group}" if quant.group else ""
        parts.append(f"{len(kept.names)} weights keep their {kind} values as {quant.scheme}{group}")
    if widened:
        types = ", ".join(f"{kind} {count}" for kind, count in sorted(widened.items()))
        again = (
            "" if quant.dense or quant.source else f", the layers' weights then quantized to {quant.label}"
        )
        parts.append(f"{widened.total()} quantized tensors are dequantized to {dtype} ({types}){again}")
    return "; ".join(parts) or None


def _kind_of(form: PackedFormat) -> str:
    """The type of the values, for people; empty where the source's name says it."""
    return "fp8" if form.floating else GGUF_TYPES[form.bits] if form.source == "gguf" else ""


def expect_stored(found: QuantConfig, given: QuantConfig) -> QuantConfig:
    """The config of a build of a quantized checkpoint, ``found``: as it is, or with the head in fewer bits.

    Raises:
        ConfigError: ``given`` asks for something else.
    """
    kept = given == found.replace(head=given.head) or _as_it_is(found, given)
    if not kept and (found.source in REPLACEABLE or SCHEMES[found.scheme].floating):
        return given
    if kept:
        return found.replace(head=given.head)
    raise ConfigError(
        f"the checkpoint is already quantized ({SOURCES[found.source]})",
        seen=given.summary,
        allowed=found.summary,
        field="quant",
        fix=f"leave out `quant`, or {FROM_ORIGINAL}",
    )


class StoredWeights:
    """Values and input scales of a packed checkpoint's layers; the engine's ``dtypes`` must hold them."""

    def __init__(self, packed: PackedLayers, mapped: Mapped, dtypes: HalfDtypes) -> None:
        self._packed = packed
        self._mapped = mapped
        self._dtypes = dtypes

    def input_scale(self, name: str) -> torch.Tensor | None:
        """fp32 [1], the static scale of a layer's input; None: its activations have none.

        Raises:
            CheckpointError: the parts of a layer have different scales.
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
        """A linear layer's quantized values, rows of several sources in order; None: the layer is not packed.

        Raises:
            CheckpointError: the values cannot be read, or parts of a layer order their columns differently.
            BuildError: the engine's dtype does not hold the scales.
        """
        mapped, floating = self._mapped[f"{name}.weight"], self._packed.form.floating
        if mapped.tied_to is not None or not all(source in self._packed for source in mapped.sources):
            return None
        if floating and (name == HEAD or not _joins(self._packed, mapped.sources)):
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
        first, orders = parts[0], [part.order for part in parts]
        expected = first.order
        if any((one is None) != (expected is None) for one in orders) or any(
            expected is not None and one is not None and not torch.equal(one, expected) for one in orders
        ):
            raise CheckpointError(
                f"{name} is one matmul, but its parts order their columns differently",
                seen=mapped.sources,
                fix=FROM_ORIGINAL,
            )
        along = 1 if first.group else 0
        scales = torch.cat([part.scales for part in parts], along)
        kept = [part.zeros for part in parts if part.zeros is not None]
        zeros = torch.cat(kept, along) if kept else None
        values = torch.cat([part.values for part in parts])
        if floating:
            return Quantized(values, scales.float(), None, first.bits, first.group)
        if self._packed.form.activations != "none":
            around_zero = (values.to(torch.int16) - (1 << (first.bits - 1))).to(torch.int8)
            return Quantized(around_zero, scales.float(), None, first.bits, first.group)
        return Quantized(values, self._exact(name, scales), zeros, first.bits, first.group, first.order)

    def _exact(self, name: str, scales: torch.Tensor) -> torch.Tensor:
        dtype = self._dtypes.at(name)
        cast = scales.to(parse_dtype(dtype))
        if not torch.equal(cast.to(scales.dtype), scales):
            raise BuildError(
                f"the scales of {name} do not fit {dtype}",
                seen=dtype_name(scales.dtype),
                fix=f"`dtype={dtype_name(scales.dtype)}`, or auto"
                + (", or `quant` for values of its own" if self._packed.form.replaceable else ""),
            )
        return cast
