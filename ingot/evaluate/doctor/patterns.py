"""A scheme for each layer in few patterns.

Owns the way from names to ``QuantConfig.layers``. Knows no model.

    mixed({"layers.0.mlp.down_proj": wide, …}, QuantConfig(narrow)).layers          # {"*.down_proj": wide}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ingot.config.quant import QuantConfig
from ingot.config.schemes import choosing


def mixed(schemes: Mapping[str, str], asked: QuantConfig) -> QuantConfig:
    """The config that has these schemes at these linear layers, ``layers.N.…``, group and symmetry as asked.

    The scheme that most layers have is the config's; patterns for operators, for whole layers and for single
    ones follow, each where it takes fewer lines than to name what it stands for.
    """
    scheme = _most_common(list(schemes.values()), asked.scheme)
    layers = _by_operator(schemes, scheme)
    layers |= _by_layer(schemes, QuantConfig(scheme, layers=layers))
    so_far = QuantConfig(scheme, layers=layers)
    layers |= {name: own for name, own in schemes.items() if so_far.at(name).scheme != own}
    found = QuantConfig(scheme, layers=layers)
    if any(own in choosing("group") for own in found.schemes):
        found = found.replace(group=asked.group, symmetric=asked.symmetric)
    assert all(found.at(name).scheme == own for name, own in schemes.items()), found
    return found


def operator(name: str) -> str:
    """``down_proj`` of ``layers.0.mlp.down_proj``."""
    return name.rpartition(".")[2]


def layer_index(name: str) -> int:
    """0 of ``layers.0.mlp.down_proj``."""
    return int(name.split(".")[1])


def _by_operator(schemes: Mapping[str, str], base: str) -> dict[str, str]:
    found = {}
    for kind in dict.fromkeys(map(operator, schemes)):
        own = [scheme for name, scheme in schemes.items() if operator(name) == kind]
        common = _most_common(own, base)
        if 1 + len(own) - own.count(common) < len(own) - own.count(base):
            found[f"*.{kind}"] = common
    return found


def _by_layer(schemes: Mapping[str, str], so_far: QuantConfig) -> dict[str, str]:
    found = {}
    for index in dict.fromkeys(map(layer_index, schemes)):
        own = {name: scheme for name, scheme in schemes.items() if layer_index(name) == index}
        odd = [scheme for name, scheme in own.items() if so_far.at(name).scheme != scheme]
        common = _most_common(list(own.values()), so_far.scheme)
        if 1 + sum(scheme != common for scheme in own.values()) < len(odd):
            found[f"layers.{index}.*"] = common
    return found


def _most_common(schemes: list[str], first: str) -> str:
    """The most frequent; ``first`` where it is as frequent as any."""
    counts = Counter(schemes)
    return max([first, *counts], key=lambda scheme: counts[scheme])
