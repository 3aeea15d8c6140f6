"""Reads what ``quant`` names: a scheme, or a YAML file with a scheme for every layer."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ingot.config.files.yaml_text import YamlError, load_yaml
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_error import QuantFieldError
from ingot.config.quantization.rptq_options import RptqConfig
from ingot.config.quantization.scheme_table import SCHEMES, choosing
from ingot.errors import ConfigError

_ENDS = (".yaml", ".yml")
# Parts of a model and patterns of their layers, wider ones first; other layers are the decoder's.
_PARTS = {
    "encoder": "encoder.*",
    "vit": "encoder.vit.*",
    "qformer": "encoder.qformer.*",
    "projector": "encoder.projector",
}
_DECODER = ("decoder", "llm")


def read_quant(
    named: str | QuantConfig | None,
    *,
    group: int | None = None,
    symmetric: bool | None = None,
    head: str | None = None,
    method: str | None = None,
    activations: str | None = None,
    alpha: float | str | None = None,
    weight_scales: str | None = None,
    rotation: bool | None = None,
    rptq: Mapping[str, object] | None = None,
) -> QuantConfig:
    """The config that ``named`` means: one itself, a scheme's name, a YAML file's path, or None: no scheme.
    In ``encoder=SCHEME,decoder=SCHEME`` or ``vit=SCHEME,qformer=SCHEME,projector=SCHEME,llm=SCHEME`` a part
    that is not named is not quantized.

    The file has ``QuantConfig``'s fields; the arguments override them, and of ``rptq`` each option by itself.

    Raises:
        ConfigError: no such scheme or file, or a value out of range.
    """
    given: dict[str, Any] = {"group": group, "symmetric": symmetric, "head": head, "method": method}
    given |= {"activations": activations, "alpha": alpha, "weight_scales": weight_scales}
    given["rotation"] = rotation
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    own = dict(rptq or {})
    if isinstance(named, QuantConfig):
        kept = {} if named.rptq is None else named.rptq.to_json()
        return named.replace(**changes, **_options(kept, own)) if changes or own else named
    if named is not None and named.endswith(_ENDS):
        fields = _fields(Path(named))
        try:
            return QuantConfig.from_json(fields | changes | _options(fields.get("rptq", {}), own))
        except QuantFieldError as error:
            if error.quant_field in changes or error.quant_field in own:
                raise
            raise error.in_file(Path(named)) from None
    changes |= _options({}, own)
    if named is not None and "=" in named:
        return QuantConfig(**_by_part(named) | changes)
    if named is not None and named not in SCHEMES:
        allowed = [*SCHEMES, "PART=SCHEME,PART=SCHEME", "FILE.yaml"]
        raise ConfigError("unknown quantization scheme", seen=named, allowed=allowed, field="quant")
    return QuantConfig(**({"scheme": named or "none"} | changes))


def quant_text(quant: QuantConfig, comments: Sequence[str] = ()) -> str:
    """The YAML file of a config: comments, and the fields that are not the defaults of its schemes."""
    usual = QuantConfig(quant.scheme, layers=quant.layers).to_json()
    fields = {name: value for name, value in quant.to_json().items() if value != usual[name]}
    free = {*choosing("symmetric")} & {*quant.schemes}
    own_fields = {"group": quant.group, "symmetric": quant.symmetric} if free else {}
    fields = {"scheme": quant.scheme} | own_fields | fields
    fields |= {"layers": quant.layers} if quant.layers else {}
    lines = [f"# {line}\n" for comment in comments for line in comment.splitlines()]
    return "".join(lines) + yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def _options(kept: object, own: Mapping[str, object]) -> dict[str, Any]:
    """RPTQ's options as a field of the config, ``own`` over those ``kept``; nothing where none is given."""
    if not own:
        return {}
    return {"rptq": RptqConfig.from_json({**kept, **own} if isinstance(kept, Mapping) else kept)}


def _by_part(named: str) -> dict[str, Any]:
    """The fields of ``encoder=w8a16,decoder=w4a16``, or of parts of an encoder by their own names."""
    pairs = [part.strip().partition("=") for part in named.split(",")]
    found = {part: scheme for part, _, scheme in pairs}
    known = {*_PARTS, *_DECODER}
    once = len(found) == len(pairs) and not {*_DECODER} <= {*found}
    if not once or not {*found} <= known or not {*found.values()} <= {*SCHEMES}:
        raise ConfigError(
            "the parts of a model and their schemes are not named",
            seen=named,
            allowed=f"PART=SCHEME, each part once: encoder and decoder; or of MiniGPT-4 {', '.join(_PARTS)} "
            f"and llm, with {', '.join(SCHEMES)}",
            field="quant",
        )
    decoder = next((found[name] for name in _DECODER if name in found), "none")
    layers = {pattern: found.get(part, "none") for part, pattern in _PARTS.items() if part in found}
    return {"scheme": decoder, "layers": {_PARTS["encoder"]: "none"} | layers}


def _fields(path: Path) -> dict[str, Any]:
    try:
        found = load_yaml(path)
    except OSError as error:
        raise ConfigError("the `quant` file cannot be read", seen=error, field="quant") from None
    except YamlError as error:
        raise ConfigError("the `quant` file is not YAML", seen=f"{path}: {error}", field="quant") from None
    if not isinstance(found, dict):
        what, allowed = "the `quant` file contains no fields", "scheme, group, layers, …"
        raise ConfigError(what, seen=path, allowed=allowed, field="quant")
    known = [one.name for one in dataclasses.fields(QuantConfig)]
    unknown = [str(key) for key in found if key not in known]
    if unknown:
        near = [(key, difflib.get_close_matches(key, known, n=1)) for key in unknown]
        meant = [f"did you mean {names[0]} instead of {key}?" for key, names in near if names]
        what, fix = "unknown field in the `quant` file", f"`quant`, in {path}: "
        fix += ", ".join(meant) or "leave it out"
        raise ConfigError(what, seen=unknown, allowed=known, field="quant", fix=fix)
    return found
