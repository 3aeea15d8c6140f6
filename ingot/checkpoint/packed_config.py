"""What a checkpoint's configuration says of weights that were stored in fewer bits.

Sources: ``GPTQConfig`` and ``AwqConfig`` of transformers 5.23, ``BaseQuantizeConfig`` of AutoGPTQ 0.8,
``QuantizationConfig`` of compressed-tensors 0.20, ``FineGrainedFP8Config`` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_files import read_json
from ingot.checkpoint.packed_keys import check_packed_keys
from ingot.config.quantization.quant_config import REPLACEABLE, QuantConfig
from ingot.config.quantization.scheme_table import GROUPS, SCHEMES, listed, stored_as, weight_only_schemes
from ingot.errors import CheckpointError

# AutoGPTQ's and AutoAWQ's, which say the same beside config.json, or instead of it.
PACKED_CONFIGS = ("quantize_config.json", "quant_config.json")
PACKED_KEYS = ("quantization_config", "compression_config")
FROM_ORIGINAL = f"build from the original checkpoint with `quant={listed(weight_only_schemes(), 'or')}`"
KEPT_TILES = (128, 128)  # of fp8, the only ones that products multiply by
_FLOATS = "float-quantized"
_FORMATS = ("pack-quantized", "int-quantized", _FLOATS)
_AWQ_KEYS = frozenset({"w_bit", "q_group_size", "zero_point"})
# Columns in the order of their groups: by a map of every column, or by none that is stored.
_ORDERS = {"group": True, "dynamic": True, True: True} | dict.fromkeys(
    ("weight", "static", False, None), False
)

Json = Mapping[str, Any]


@dataclass(frozen=True)
class PackedFormat:
    """How the packed linear layers of a checkpoint are stored; all alike.

    Attributes:
        source: ``gptq``, ``awq``, ``compressed-tensors``, ``fp8`` or ``gguf``.
        bits: of a quantized value, 4 or 8.
        group: neighbouring columns (in the order of ``act_order``) that share a scale; 0: one scale per row.
        symmetric: values stand around the middle, and zeros are not kept.
        act_order: a layer has an order of its columns in which groups are neighbours.
        stored_zero: the zero that is stored as 0.
        whole_bytes: values are stored one per byte, not packed into words.
        activations: ``none``: they keep the engine's dtype; ``dynamic``, ``static``: as in ``QuantConfig``.
        floating: values are fp8 (e4m3).
        tiles: (rows, columns) that share a scale, of fp8 in blocks; ``group`` is 0.
    """

    source: str
    bits: int
    group: int
    symmetric: bool
    act_order: bool = False
    stored_zero: int = 0
    whole_bytes: bool = False
    activations: str = "none"
    floating: bool = False
    tiles: tuple[int, int] | None = None

    @property
    def replaceable(self) -> bool:
        """Whether a build may dequantize the values and choose others."""
        return self.source in REPLACEABLE or self.floating

    @property
    def kept(self) -> bool:
        """Whether a scheme stores the values as they are; otherwise every build dequantizes them."""
        return not self.floating or self.activations == "dynamic"

    def quant(self, dense: Mapping[str, str] | None = None) -> QuantConfig:
        """The config of an engine with these values; ``dense``: layers that are not packed, → ``none``."""
        if not self.kept:
            return QuantConfig()
        return QuantConfig(
            stored_as(self.bits, self.activations, floating=self.floating),
            self.group,
            self.symmetric,
            layers=dict(dense or {}),
            activations=self.activations,
            weight_scales="channel" if self.tiles is None else "block",
            source=self.source,
            act_order=self.act_order,
        )


def packed_format(config: Json, beside: Mapping[str, Json] | None = None) -> PackedFormat | None:
    """The format that config.json and the files ``beside`` it (name → content) agree on; None: there is none.

    Raises CheckpointError where it is not supported, a setting is unknown or odd, or the files differ.
    """
    given = {key: config[key] for key in PACKED_KEYS if config.get(key)}
    given |= beside or {}
    if not given:
        return None
    for where, found in given.items():
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{where} is not an object", seen=found, fix="config.json")
    method = next((_method(found) for found in given.values() if _method(found)), None)
    formats = {where: _read(where, found, method) for where, found in given.items()}
    (first, form), *others = formats.items()
    for where, other in others:
        if other != form:
            pairs = [(one.name, getattr(form, one.name), getattr(other, one.name)) for one in fields(form)]
            raise CheckpointError(
                f"{first} and {where} describe different formats",
                seen=", ".join(f"{name} {a!r} and {b!r}" for name, a, b in pairs if a != b),
                fix="remove the one that does not belong to these weights, or download all files of one "
                "revision again",
            )
    return form


def packed_files(folder: Path, names: Collection[str]) -> dict[str, Json]:
    """The quantizers' own config files among a folder's ``names``, by name."""
    return {name: read_json(folder / name) for name in PACKED_CONFIGS if name in names}


def _method(found: Json) -> object:
    return found.get("quant_method") or found.get("method")


def _read(where: str, found: Json, method: object) -> PackedFormat:
    """One file's format; ``method``: of a file that names none, as old tools write beside config.json."""
    kinds = {str(found[key]).lower() for key in ("quant_method", "method") if found.get(key)}
    if len(kinds) > 1:
        raise _refused("quantization method", " and ".join(sorted(kinds)), "one method")
    if not kinds and where in PACKED_CONFIGS:
        kinds = {str(method) if method else "awq" if _AWQ_KEYS & set(found) else "gptq"}
    kind = next(iter(kinds), None)
    if kind not in _READERS:
        raise _refused("quantization method", kind, tuple(_READERS))
    form = _READERS[kind](found)
    check_packed_keys(kind, found, where)
    return form


def _gptq(found: Json) -> PackedFormat:
    if _flag(found, "is_marlin_format", False):
        raise _refused("GPTQ format", "marlin", ("gptq", "gptq_v2"))
    form = _layout(found, "GPTQ format", ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    _check_words("GPTQ", found)
    bits, group = _bits(found.get("bits")), _group(found.get("group_size"))
    ordered = _flag(found, "desc_act", False) and not _flag(found, "static_groups", False) and group != 0
    return PackedFormat(
        "gptq", bits, group, _flag(found, "sym", True), ordered, stored_zero=1 if form == "gptq" else 0
    )


def _awq(found: Json) -> PackedFormat:
    _layout(found, "AWQ version", ("version", "format", "checkpoint_format"), ("gemm",))
    if found.get("backend") == "llm-awq":
        raise _refused("AWQ backend", "llm-awq", "another one")
    if not _flag(found, "zero_point", True):
        raise _refused("AWQ", "zero_point false", "zero_point true")
    if _flag(found, "desc_act", False):
        raise _refused("AWQ", "desc_act true", "desc_act false")
    _check_words("AWQ", found)
    bits = found.get("bits", found.get("w_bit"))
    if bits != 4:
        raise _refused("number of bits of AWQ", bits, 4)
    return PackedFormat("awq", 4, _group(found.get("group_size", found.get("q_group_size"))), symmetric=False)


def _layout(found: Json, what: str, keys: tuple[str, ...], known: tuple[str, ...]) -> str:
    """The layout that these keys name alike; the first of ``known`` where there is none of them."""
    named = {key: str(found[key]).lower() for key in keys if found.get(key)}
    for form in named.values():
        if form not in known:
            raise _refused(what, form, known)
    if len(set(named.values())) > 1:
        raise CheckpointError(
            "the quantization config names two layouts",
            seen=named,
            fix=f"give {' and '.join(named)} the same value, that of the tool that packed these weights",
        )
    return next(iter(named.values()), known[0])


def _check_words(name: str, found: Json) -> None:
    """Refuse what GPTQ and AWQ say alike of layers that differ, of the head and of words."""
    if _flag(found, "lm_head", False):
        raise _refused(name, "a quantized lm_head", "an unquantized lm_head")
    dynamic = found.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise _refused(f"{name} dynamic", dynamic, "an object")
    own = [pattern for pattern in dynamic if not str(pattern).startswith("-:")]
    if own:
        raise _refused(name, f"different bits for {own[:3]}", "one format for all layers")
    packs = str(found.get("pack_dtype") or "int32").removeprefix("torch.")
    if packs != "int32":
        raise _refused(f"{name} pack_dtype", packs, "int32")
    kind, bits = found.get("data_type") or "int", found.get("act_bits") or 16
    if kind != "int":
        raise _refused(f"{name} data_type", kind, "int")
    if not isinstance(bits, int) or bits < 16:
        raise _refused(f"{name} act_bits", bits, "16: activations keep the engine's dtype")


def _compressed(found: Json) -> PackedFormat:
    form = found.get("format")
    if form not in _FORMATS:
        raise _refused("compressed-tensors format", form, _FORMATS)
    for key in ("kv_cache_scheme", "transform_config"):
        if found.get(key):
            raise _refused("compressed-tensors", key, f"no {key}")
    sparsity = found.get("sparsity_config") or {}
    sparse = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if sparse != "dense":
        raise _refused("compressed-tensors sparsity", sparse, "dense")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("compressed-tensors without config_groups", seen=groups, fix="config.json")
    kinds = {name: _weight_format(group, form) for name, group in groups.items()}
    if len(set(kinds.values())) != 1:
        raise _refused("compressed-tensors", f"mixed formats: {sorted(kinds)}", "one for all layers")
    return next(iter(kinds.values()))


def _weight_format(group: Any, form: str) -> PackedFormat:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _refused("compressed-tensors group", group, "an object with weights")
    if group.get("output_activations"):
        raise _refused("compressed-tensors", "output_activations", "none")
    if group.get("format") not in (None, form):
        raise _refused("format of a compressed-tensors group", group["format"], f"{form}, as of all layers")
    kind = weights.get("type") or "int"
    if form == _FLOATS:
        return _fp8(weights, group.get("input_activations"))
    if kind != "int":
        raise _refused("type of compressed-tensors", kind, "int")
    if weights.get("dynamic"):
        raise _refused("compressed-tensors weights", f"dynamic {weights['dynamic']}", "dynamic false")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel", "tensor"):
        raise _refused("strategy of compressed-tensors", strategy, ("group", "channel", "tensor"))
    group_size = _group(weights.get("group_size")) if strategy == "group" else 0
    order = weights.get("actorder")
    if isinstance(order, (list, dict)) or order not in _ORDERS:
        raise _refused("actorder of compressed-tensors", order, [one for one in _ORDERS if one])
    bits, symmetric = _bits(weights.get("num_bits")), _flag(weights, "symmetric", True)
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
        _ORDERS[order] and group_size != 0,
        whole_bytes=whole,
        activations=activations,
    )


def _fp8(weights: Json, activations: Any) -> PackedFormat:
    """``float-quantized``: e4m3 with a scale per row, layer or block; inputs of any fp8 kind or none, of
    which those with a scale per token are kept, and beside blocks of 128 x 128 per 128 columns of a token.
    """
    own = {
        key: weights.get(key) for key in ("type", "num_bits", "strategy", "symmetric", "dynamic", "actorder")
    }
    strategy = own["strategy"] or "channel"
    known = own["type"] == "float" and own["num_bits"] == 8 and own["symmetric"] in (True, None)
    if not known or own["dynamic"] or own["actorder"] or strategy not in ("channel", "tensor", "block"):
        raise _refused("compressed-tensors weights", own, "8-bit float, symmetric: channel, tensor or block")
    tiles = weights.get("block_structure") if strategy == "block" else None
    sizes = isinstance(tiles, list) and len(tiles) == 2
    if strategy == "block" and not (sizes and all(type(one) is int and one > 0 for one in tiles or ())):
        raise _refused("block_structure of compressed-tensors", tiles, "[rows, columns]")
    if activations:
        kind = isinstance(activations, Mapping) and (activations.get("type"), activations.get("num_bits"))
        if kind != ("float", 8):
            raise _refused("compressed-tensors activations beside fp8 weights", activations, "8-bit float")
    inputs = activations or {}
    if tiles:
        grouped = inputs.get("strategy") == "group" and inputs.get("group_size") == KEPT_TILES[1]
        fits = grouped and tuple(tiles) == KEPT_TILES
    else:
        fits = inputs.get("strategy") in ("token", None)
    by_token = fits and inputs.get("dynamic") is True
    return PackedFormat(
        "compressed-tensors",
        8,
        0,
        symmetric=True,
        whole_bytes=True,
        activations="dynamic" if by_token else "none",
        floating=True,
        tiles=(tiles[0], tiles[1]) if tiles else None,
    )


def _fine_grained(found: Json) -> PackedFormat:
    """``fp8`` of transformers: e4m3 in blocks; inputs with scales of their own are kept beside 128 x 128."""
    kind, scheme = found.get("fmt") or "e4m3", found.get("activation_scheme") or "dynamic"
    if kind != "e4m3":
        raise _refused("fp8 format (fmt)", kind, "e4m3")
    if scheme not in ("dynamic", "static"):
        raise _refused("activation_scheme of fp8", scheme, ("dynamic", "static"))
    tiles = found.get("weight_block_size")
    if not isinstance(tiles, list) or len(tiles) != 2 or any(type(n) is not int or n < 1 for n in tiles):
        raise _refused("weight_block_size of fp8", tiles, "[rows, columns]")
    kept = scheme == "dynamic" and tuple(tiles) == KEPT_TILES
    return PackedFormat(
        "fp8",
        8,
        0,
        symmetric=True,
        whole_bytes=True,
        activations="dynamic" if kept else "none",
        floating=True,
        tiles=(tiles[0], tiles[1]),
    )


def _activations(found: Any) -> str:
    """``none``, ``dynamic`` (one scale per token) or ``static`` (one of all)."""
    if not found:
        return "none"
    keys = ("num_bits", "type", "symmetric", "strategy", "dynamic", "group_size", "actorder")
    if not isinstance(found, Mapping):
        raise _refused("compressed-tensors activations", found, "an object")
    own = {key: found.get(key) for key in keys}
    own = {"num_bits": 8, "type": "int", "symmetric": True} | {k: v for k, v in own.items() if v is not None}
    dynamic = own.get("dynamic", False)
    strategy = own.setdefault("strategy", "token" if dynamic is True else "tensor")
    known = {(True, "token"): "dynamic", (False, "tensor"): "static"}
    kind = known.get((dynamic, strategy)) if isinstance(dynamic, bool) and isinstance(strategy, str) else None
    parts = own.get("group_size") or own.get("actorder")
    if kind is None or parts or (own["num_bits"], own["type"], own["symmetric"]) != (8, "int", True):
        allowed = "symmetric 8-bit int: dynamic with one scale per token, or static with one per tensor"
        raise _refused("compressed-tensors activations", own, allowed)
    return kind


def _flag(found: Json, key: str, default: bool) -> bool:
    """true or false; null is the default."""
    value = found.get(key)
    if value is not None and not isinstance(value, bool):
        raise _refused(key, repr(value), "true or false")
    return default if value is None else value


def _bits(bits: Any) -> int:
    known = sorted(SCHEMES[name].weight_bits for name in weight_only_schemes())
    if isinstance(bits, bool) or bits not in known:
        raise _refused("number of bits", bits, known)
    return int(bits)


def _group(size: Any) -> int:
    """-1, and nothing, stand for one scale per row."""
    group = 0 if size in (None, -1) else size
    if isinstance(group, bool) or group not in GROUPS:
        raise _refused("group size", size, [-1, *(one for one in GROUPS if one)])
    return int(group)


def _refused(what: str, seen: object, allowed: object) -> CheckpointError:
    what = f"unsupported quantization format: {what}"
    return CheckpointError(what, seen=seen, allowed=allowed, fix=FROM_ORIGINAL)


_READERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fine_grained}
