"""What each linear layer may be stored in, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ingot.config.quantization.quant_config import HEAD, QuantConfig
from ingot.config.quantization.scheme_table import choosing, ladder, ladder_schemes
from ingot.engine.assembly import Assembly
from ingot.errors import ConfigError
from ingot.layers.linear import linears
from ingot.quant.schemes.linear_scheme import LinearScheme

DENSE = "none"


@dataclass(frozen=True)
class StoredForm:
    """A scheme, and what a linear layer stores in it, without bias; None: the values nearest to a weight."""

    scheme: LinearScheme
    tensors: Mapping[str, torch.Tensor] | None = None

    def of(self, weight: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors for a weight [N, K], which a build casts to ``dtype`` first, on its device."""
        if self.tensors is None:
            return self.scheme.pack(weight.float() if self.scheme.packs_fp32 else weight.to(dtype), None)
        return {leaf: tensor.to(weight.device) for leaf, tensor in self.tensors.items()}


@dataclass(frozen=True)
class LayerOptions:
    """A linear layer, its schemes from fewest bits, and the bytes of its stored weight in each."""

    name: str
    num_weights: int
    schemes: dict[str, StoredForm] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)


def ladder_of(scheme: str, up_to: str = DENSE) -> tuple[str, ...]:
    """The schemes that a layer may have, from ``scheme`` to ``up_to``, or ConfigError."""
    if scheme not in ladder_schemes():
        what = "doctor does not support this scheme"
        what = "there is nothing to choose without quantization" if scheme == DENSE else what
        raise ConfigError(what, seen=scheme, allowed=list(ladder_schemes()), field="quant")
    found = ladder(scheme)
    if up_to not in found:
        raise ConfigError("no such scheme for `up_to`", seen=up_to, allowed=list(found), field="up_to")
    return found[: found.index(up_to) + 1]


def options_of(assembly: Assembly, asked: QuantConfig, ladder: Sequence[str]) -> list[LayerOptions]:
    """The linear layers of the decoder's layers, in order; groups and symmetry of 4 bits as ``asked``."""
    layers: dict[str, LayerOptions] = {}
    for scheme in ladder:
        quant = QuantConfig(scheme)
        if scheme == asked.scheme and asked.in_blocks:
            quant = asked
        elif scheme in choosing("group"):
            quant = quant.replace(group=asked.group, symmetric=asked.symmetric)
        if scheme in choosing("rotation"):
            quant = quant.replace(rotation=asked.rotation)
        model = assembly.architecture.empty_model(assembly.model_config, assembly.build, quant)
        for name, linear in linears(model).items():
            layer = layers.setdefault(name, LayerOptions(name, linear.in_features * linear.out_features))
            own = [tensor.nbytes for leaf, tensor in linear.named_parameters(recurse=False) if leaf != "bias"]
            layer.schemes[scheme], layer.num_bytes[scheme] = StoredForm(linear.scheme), sum(own)
    layers.pop(HEAD, None)
    return list(layers.values())
