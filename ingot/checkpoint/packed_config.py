"""What a checkpoint's configuration says of weights that somebody stored in fewer bits.

Owns the keys of GPTQ, AWQ and compressed-tensors and the refusal, by name, of what is not read. Knows no
tensor.

    packed = packed_format(config, beside)       # config.json, quantize_config.json; None: weights are whole

Sources: ``GPTQConfig`` and ``AwqConfig`` of transformers 5.23, ``BaseQuantizeConfig`` of AutoGPTQ 0.8,
``QuantizationConfig`` of compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.config.quant import QuantConfig
from ingot.config.schemes import GROUPS, SCHEMES, WEIGHT_ONLY, listed, stored_as
from ingot.errors import CheckpointError

PACKED_CONFIG = "quantize_config.json"
PACKED_KEYS = ("quantization_config", "compression_config")
FROM_ORIGINAL = f"build from the original checkpoint with --quant {listed(WEIGHT_ONLY, 'or')}"
_KINDS = ("gptq", "awq", "compressed-tensors")

Json = Mapping[str, Any]


@dataclass(frozen=True)
class PackedFormat:
    """How the packed linear layers of a checkpoint are stored; all alike.

    Attributes:
        source: ``gptq``, ``awq`` or ``compressed-tensors``.
        bits: of a number, 4 or 8.
        group: neighbouring columns (in the order of ``act_order``) that share a scale; 0: a scale a row.
        symmetric: numbers stand around the middle, and zeros are not kept.
        act_order: a layer has an order of its columns in which groups are neighbours.
        stored_zero: the zero that is stored as 0.
        whole_bytes: numbers lie one to a byte, not packed into words.
        activations: ``none``: they keep the engine's dtype; ``dynamic``, ``static``: as in ``QuantConfig``.
    """

    source: str
    bits: int
    group: int
    symmetric: bool
    act_order: bool = False
    stored_zero: int = 0
    whole_bytes: bool = False
    activations: str = "none"

    def quant(self, dense: Mapping[str, str] | None = None) -> QuantConfig:
        """The config of an engine with these numbers; ``dense``: layers that are not packed, → ``none``."""
        return QuantConfig(
            stored_as(self.bits, self.activations),
            self.group,
            self.symmetric,
            layers=dict(dense or {}),
            activations=self.activations,
            source=self.source,
            act_order=self.act_order,
        )


def packed_format(config: Json, beside: Json | None = None) -> PackedFormat | None:
    """The format that config.json, or AutoGPTQ's quantize_config.json ``beside`` it, names.

    Raises:
        CheckpointError: it is one that is not read, or a value is missing or odd.
    """
    own = next((config[key] for key in PACKED_KEYS if config.get(key)), None)
    if own is None and beside is None:
        return None
    found = own if own is not None else {"quant_method": "gptq"} | dict(beside or {})
    if not isinstance(found, Mapping):
        raise CheckpointError("quantization_config is not an object", seen=found, fix="config.json")
    kind = found.get("quant_method")
    if kind == "gptq":
        return _gptq(found)
    if kind == "awq":
        return _awq(found)
    if kind == "compressed-tensors":
        return _compressed(found)
    raise _refused("quantization method", kind, _KINDS)


def _gptq(found: Json) -> PackedFormat:
    form = str(found.get("checkpoint_format") or found.get("format") or "gptq").lower()
    if found.get("is_marlin_format"):
        form = "marlin"
    if form not in ("gptq", "gptq_v2"):
        raise _refused("GPTQ format", form, ("gptq", "gptq_v2"))
    if found.get("lm_head"):
        raise _refused("GPTQ", "a quantized lm_head", "an unquantized lm_head")
    own = [pattern for pattern in found.get("dynamic") or () if not str(pattern).startswith("-:")]
    if own:
        raise _refused("GPTQ", f"different bits for {own[:3]}", "one format for all layers")
    packs = str(found.get("pack_dtype") or "int32")
    if packs != "int32":
        raise _refused("GPTQ pack_dtype", packs, "int32")
    bits, group = _bits(found.get("bits")), _group(found.get("group_size"))
    ordered = bool(found.get("desc_act")) and not found.get("static_groups") and group != 0
    return PackedFormat(
        "gptq", bits, group, bool(found.get("sym", True)), ordered, 1 if form == "gptq" else 0
    )


def _awq(found: Json) -> PackedFormat:
    form = str(found.get("version") or found.get("format") or "gemm").lower()
    if form != "gemm":
        raise _refused("AWQ version", form, "gemm")
    if not found.get("zero_point", True):
        raise _refused("AWQ", "zero_point false", "zero_point true")
    bits = found.get("bits", found.get("w_bit"))
    if bits != 4:
        raise _refused("number of bits of AWQ", bits, 4)
    return PackedFormat("awq", 4, _group(found.get("group_size", found.get("q_group_size"))), symmetric=False)


def _compressed(found: Json) -> PackedFormat:
    form = found.get("format")
    if form not in ("pack-quantized", "int-quantized"):
        raise _refused("compressed-tensors format", form, ("pack-quantized", "int-quantized"))
    for key in ("kv_cache_scheme", "transform_config"):
        if found.get(key):
            raise _refused("compressed-tensors", key, f"no {key}")
    sparse = (found.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise _refused("compressed-tensors sparsity", sparse, "dense")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("compressed-tensors without config_groups", seen=groups, fix="config.json")
    kinds = {name: _of_weights(group, form) for name, group in groups.items()}
    if len(set(kinds.values())) != 1:
        raise _refused("compressed-tensors", f"mixed formats: {sorted(kinds)}", "one for all layers")
    return next(iter(kinds.values()))


def _of_weights(group: Any, form: str) -> PackedFormat:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _refused("compressed-tensors group", group, "an object with weights")
    if group.get("output_activations"):
        raise _refused("compressed-tensors", "output_activations", "none")
    kind = weights.get("type", "int")
    if kind != "int":
        raise _refused("type of compressed-tensors", kind, "int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel", "tensor"):
        raise _refused("strategy of compressed-tensors", strategy, ("group", "channel", "tensor"))
    group_size = _group(weights.get("group_size")) if strategy == "group" else 0
    ordered = weights.get("actorder") in ("group", "dynamic", True) and group_size != 0
    bits, symmetric = _bits(weights.get("num_bits")), bool(weights.get("symmetric", True))
    whole = form == "int-quantized"
    activations = _activations(group.get("input_activations"))
    if activations != "none" and not (whole and bits == 8 and symmetric and not group_size):
        allowed = "int-quantized symmetric 8-bit weights, one scale per row or per tensor"
        raise _refused("compressed-tensors weights under int8 activations", dict(weights), allowed)
    return PackedFormat(
        "compressed-tensors",
        bits,
        group_size,
        symmetric,
        ordered,
        whole_bytes=whole,
        activations=activations,
    )


def _activations(found: Any) -> str:
    """``none``, ``dynamic`` (a scale a token) or ``static`` (one of all)."""
    if not found:
        return "none"
    keys = ("num_bits", "type", "symmetric", "strategy", "dynamic")
    own = {key: found.get(key) for key in keys} if isinstance(found, Mapping) else {}
    own = {"num_bits": 8, "type": "int", "symmetric": True} | {k: v for k, v in own.items() if v is not None}
    dynamic = own.get("dynamic", False)
    strategy = own.setdefault("strategy", "token" if dynamic is True else "tensor")
    kind = None
    if dynamic is True and strategy == "token":
        kind = "dynamic"
    elif dynamic is False and strategy == "tensor":
        kind = "static"
    if kind is None or (own["num_bits"], own["type"], own["symmetric"]) != (8, "int", True):
        allowed = "symmetric 8-bit int: dynamic with one scale per token, or static with one per tensor"
        raise _refused("compressed-tensors activations", own, allowed)
    return kind


def _bits(bits: Any) -> int:
    known = sorted(SCHEMES[name].weight_bits for name in WEIGHT_ONLY)
    if isinstance(bits, bool) or bits not in known:
        raise _refused("number of bits", bits, known)
    return int(bits)


def _group(size: Any) -> int:
    """-1, and nothing, stand for a scale a row."""
    group = 0 if size in (None, -1) else size
    if isinstance(group, bool) or group not in GROUPS:
        raise _refused("group size", size, [-1, *(one for one in GROUPS if one)])
    return int(group)


def _refused(what: str, seen: object, allowed: object) -> CheckpointError:
    return CheckpointError(
        f"unsupported quantization format: {what}",
        seen=seen,
        allowed=allowed,
        fix=FROM_ORIGINAL,
    )
