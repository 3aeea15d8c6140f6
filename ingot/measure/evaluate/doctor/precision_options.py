"""What each linear layer may be stored in, and what that takes.

Owns the ladder of schemes, from fewest bits to the engine's dtype, and the bytes of every option. Knows no
choice and reads no weights.

    layers = options_of(assembly, QuantConfig(scheme), ladder_of(scheme))
    layers[0].name, layers[0].options[scheme].num_bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.config.quantization.quant_config import HEAD, QuantConfig
from ingot.config.quantization.scheme_table import SCHEMES, choosing, ladder, ladder_schemes
from ingot.engine.assembly import Assembly
from ingot.errors import ConfigError
from ingot.layers.linear import Linear, linears
from ingot.quant.schemes.linear_scheme import LinearScheme

DENSE = "none"


@dataclass(frozen=True)
class PrecisionOption:
    """A layer in a scheme; ``num_bytes`` are of its weight as it is stored, without the bias."""

    scheme: LinearScheme
    num_bytes: int


@dataclass(frozen=True)
class LayerOptions:
    """A linear layer of the decoder and its options by scheme, from fewest bits."""

    name: str
    num_weights: int
    options: dict[str, PrecisionOption]


def ladder_of(scheme: str, up_to: str = DENSE) -> tuple[str, ...]:
    """The schemes that a layer may have, the asked one first.

    Raises:
        ConfigError: there is no such ladder, or ``up_to`` is not on it.
    """
    if scheme not in ladder_schemes():
        dense = scheme == DENSE
        raise ConfigError(
            "there is nothing to choose without quantization"
            if dense
            else "doctor does not support this scheme",
            seen=scheme,
            allowed=list(ladder_schemes()),
            field="quant",
        )
    found = ladder(scheme)
    if up_to not in found:
        raise ConfigError("no such scheme for `up_to`", seen=up_to, allowed=list(found), field="up_to")
    return found[: found.index(up_to) + 1]


def saves_time_only(scheme: str) -> bool:
    """Whether a scheme takes as many bytes as the next wider one, so that only time is to be saved."""
    info = SCHEMES[scheme]
    return info.weight_bits == SCHEMES[info.wider].weight_bits


def options_of(assembly: Assembly, asked: QuantConfig, ladder: Sequence[str]) -> list[LayerOptions]:
    """The linear layers of the decoder's layers, in order; groups and symmetry of 4 bits as ``asked``."""
    by_scheme = {scheme: _linears(assembly, asked, scheme) for scheme in ladder}
    return [
        LayerOptions(
            name,
            linear.in_features * linear.out_features,
            {scheme: _option(found[name]) for scheme, found in by_scheme.items()},
        )
        for name, linear in by_scheme[ladder[0]].items()
        if name != HEAD
    ]


def _linears(assembly: Assembly, asked: QuantConfig, scheme: str) -> dict[str, Linear]:
    quant = QuantConfig(scheme)
    if scheme in choosing("group"):
        quant = quant.replace(group=asked.group, symmetric=asked.symmetric)
    return linears(assembly.architecture.empty_model(assembly.model_config, assembly.build, quant))


def _option(linear: Linear) -> PrecisionOption:
    own = [tensor for name, tensor in linear.named_parameters(recurse=False) if name != "bias"]
    return PrecisionOption(linear.scheme, sum(tensor.numel() * tensor.element_size() for tensor in own))
