"""A scheme for each layer, as few patterns of ``QuantConfig.layers``.

mixed({"layers.0.mlp.down_proj": wide, …}, QuantConfig(narrow)).layers          # {"*.down_proj": wide}
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from ingot.config.half_dtypes import in_encoder
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.scheme_table import choosing

_ENCODER = "encoder."
_LAYER = re.compile(r"(?:\w+\.)*?layers\.\d+\.")
_STACK_OF = re.compile(r"\.\d+\..*")


def mixed(schemes: Mapping[str, str], asked: QuantConfig) -> QuantConfig:
    """The config with these schemes at these linear layers, ``layers.N.…`` and ``encoder.layers.N.…``; group,
    symmetry and rotation, and RPTQ's options and method, are those of ``asked``.

    The most frequent scheme is the config's. Patterns for an encoder, for operators, for whole layers and for
    single ones follow, each where it takes fewer lines than the names it stands for.
    """
    scheme = _most_common(list(schemes.values()), asked.scheme)
    encodes = any(map(in_encoder, schemes))
    layers: dict[str, str] = {}
    for pattern_of in (_half, _stack, _operator_anywhere if encodes else _leaf_anywhere, _whole_layer):
        layers |= _patterns(schemes, QuantConfig(scheme, layers=layers), pattern_of)
    so_far = QuantConfig(scheme, layers=layers)
    layers |= {name: own for name, own in schemes.items() if _named(so_far, name) != own}
    found = QuantConfig(scheme, layers=layers)
    if any(own in choosing("group") for own in found.schemes):
        found = found.replace(group=asked.group, symmetric=asked.symmetric)
    if any(own in choosing("rotation") for own in found.schemes):
        found = found.replace(rotation=asked.rotation)
    if found.in_blocks:
        found = found.replace(method=asked.method, rptq=asked.rptq)
    assert all(_named(found, name) == own for name, own in schemes.items()), found
    return found


def _named(config: QuantConfig, name: str) -> str:
    """The scheme that a config's patterns name, before RPTQ's sites in 8 bits."""
    matched = [scheme for pattern, scheme in config.layers.items() if fnmatchcase(name, pattern)]
    return matched[-1] if matched else config.scheme


def operator(name: str) -> str:
    """``down_proj`` of ``layers.0.mlp.down_proj``; those of encoders and cross-attention are named apart:
    ``encoder.down_proj``, ``encoder.vit.down_proj``, ``encoder_attn.o_proj``.
    """
    *_, module, leaf = name.split(".")
    own = f"{module}.{leaf}" if module == "encoder_attn" else leaf
    if not in_encoder(name):
        return own
    return f"{name.partition('layers.')[0]}{own}" if _LAYER.match(name) else name


def layer_of(name: str) -> str:
    """``layers.0`` of ``layers.0.mlp.down_proj``, ``encoder.vit.layers.0`` in an encoder; a product in no
    layer, such as ``encoder.projector``, as it is.
    """
    found = _LAYER.match(name)
    return name if found is None else found[0].removesuffix(".")


def layer_index(name: str) -> int | None:
    """0 of ``layers.0.mlp.down_proj`` and of ``encoder.vit.layers.0.mlp.down_proj``; None outside layers."""
    index = layer_of(name).rpartition(".")[2]
    return int(index) if index.isdecimal() else None


def _half(name: str) -> str:
    return f"{_ENCODER}*" if in_encoder(name) else "layers.*"


def _stack(name: str) -> str:
    """``encoder.vit.layers.*`` of an encoder of several stacks."""
    return f"{_STACK_OF.sub('', name)}.*" if _LAYER.match(name) else name


def _leaf_anywhere(name: str) -> str:
    return f"*.{name.rpartition('.')[2]}"


def _operator_anywhere(name: str) -> str:
    """Of one half: an encoder's operators are called as the decoder's are."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _whole_layer(name: str) -> str:
    layer = layer_of(name)
    return name if layer == name else f"{layer}.*"


def _patterns(
    schemes: Mapping[str, str], so_far: QuantConfig, pattern_of: Callable[[str], str]
) -> dict[str, str]:
    """The patterns that save lines, with the most common scheme of what each stands for."""
    groups: dict[str, dict[str, str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(pattern_of(name), {})[name] = scheme
    found = {}
    for pattern, own in groups.items():
        odd = [scheme for name, scheme in own.items() if _named(so_far, name) != scheme]
        common = _most_common(list(own.values()), so_far.scheme)
        if 1 + sum(scheme != common for scheme in own.values()) < len(odd):
            found[pattern] = common
    return found


def _most_common(schemes: list[str], first: str) -> str:
    """The most frequent; ``first`` where it is as frequent as any."""
    counts = Counter(schemes)
    return max([first, *counts], key=lambda scheme: counts[scheme])
