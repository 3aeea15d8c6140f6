"""Two files to start a port from: the architecture and its parity test.

write_port(report, checkpoint_config, Path("port"))    # port/stablelm.py, port/test_stablelm.py
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ingot.config.json_config import JsonConfig
from ingot.errors import CheckpointError, ConfigError
from ingot.measure.port.config_reading import MEANINGS, meaning_of
from ingot.measure.port.nearest import ConfigComparison
from ingot.measure.port.port_report import PortReport
from ingot.measure.port.port_templates import MODEL, TEST
from ingot.measure.port.tensor_matching import literal
from ingot.models.model_registry import ARCHITECTURES

_HEAD = re.compile(r'(?:Rename\("lm_head\.weight", (".*")\)|Tie\("lm_head\.weight", .*copy=(".*")\))')
# Sizes of the test's model by field; what is not here stays as the checkpoint has it.
_TINY: Mapping[str, int] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_positions": 128,
    "sliding_window": 7,
}
_MOST_LISTED = 1 << 10  # values of a list that are looked at, as many as layers may be
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_port(report: PortReport, hf: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write the architecture and its test; returns their paths.

    Raises:
        CheckpointError: the architecture is registered, or nothing is known of its tensors.
        ConfigError: a file is there already, or the folder cannot be made.
    """
    nearest = report.nearest
    if report.registered is not None or nearest is None:
        raise CheckpointError(
            "nothing to port: Ingot has this architecture",
            seen=f"{', '.join(report.hf_names)}, which is {report.registered}",
            fix="`ingot build` it; settings that it refuses belong into its file in ingot/models/",
        )
    name = file_name(report)
    paths = folder / f"{name}.py", folder / f"test_{name}.py"
    there = [str(path) for path in paths if path.exists()]
    if there:
        fix = "`output=FOLDER`, another folder, or move the files"
        raise ConfigError("a file is there already", seen=there, field="output", fix=fix)
    texts = model_text(report, nearest, name), test_text(report, nearest, hf, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "`output=FOLDER`, a folder that can be written"
        raise ConfigError("cannot write the port", seen=error, field="output", fix=fix) from None
    return paths


def file_name(report: PortReport) -> str:
    """A module's name from ``model_type``, else from the class's name, that nothing else has."""
    taken = {architecture.name for architecture in ARCHITECTURES} | {"ingot", "torch", "transformers"}
    stems = (report.model_type or "", *(re.sub(r"For\w+$", "", name) for name in report.hf_names))
    for stem in stems:
        name = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_")[:40]
        free = name not in taken and name not in sys.stdlib_module_names and not keyword.iskeyword(name)
        if name and name[0].isalpha() and free:
            return name
    return "ported_model"


def open_points(nearest: ConfigComparison) -> list[str]:
    """What keeps the port from being complete, one line each."""
    reading, tensors = nearest.reading, nearest.tensors
    points = []
    for key, value in reading.unknown.items():
        field = meaning_of(key)
        sets = f"; other families set DecoderConfig.{field} by it" if field else ""
        points.append(f"config {key}={value}: unknown to {nearest.architecture}{sets}")
    for refusal in reading.refused:
        field = meaning_of(refusal.key)
        sets = f" (DecoderConfig.{field})" if field else ""
        points.append(f"config {refusal.key}={refusal.value}{sets}: {refusal.why}")
    points += [f"config {key}: missing, and {nearest.architecture} needs it" for key in reading.missing]
    points += [
        f"config {key}: {nearest.architecture} knows the key and does not read it; this family may"
        for key in reading.unread
    ]
    for one in () if tensors is None else tensors.tensors:
        if one.rule is None:
            points.append(f"tensor {one.pattern}: no rule" + (f"; {one.why}" if one.why else ""))
    points += [f"rule without a tensor: {rule}" for rule in (tensors.without_tensor if tensors else ())]
    return points


def model_text(report: PortReport, nearest: ConfigComparison, name: str) -> str:
    """The architecture's file."""
    points, reading, tensors = open_points(nearest), nearest.reading, nearest.tensors
    rules = list(_rule_lines(tensors.rules if tensors else ()))
    used = {line.partition("(")[0] for line in rules} - {"head_rule"}
    prefixes = tensors.prefixes if tensors else ("",)
    values = {
        "name": name,
        "nearest": nearest.architecture,
        "score": f"{nearest.score:.2f}",
        "names": ", ".join(sorted(used | {"WeightMap"})),
        "head": ", head_rule" if any(line.startswith("head_rule") for line in rules) else "",
        "classes": literal(report.hf_names),
        "model_type": literal(report.model_type or name),
        "todo": _items(points, "TODO "),
        "read_as": _mapping(reading.renamed),
        "proposed": "".join(
            f"    # {_comment(str(one.pattern))}: {one.why}\n"
            for one in (tensors.tensors if tensors else ())
            if one.rule is not None and one.why is not None
        ),
        "defaults": _wrapped(reading.defaults) or "    # (none)\n",
        "fields": _fields(nearest),
        "rules": "".join(f"        {line},\n" for line in rules),
        "prefixes": "" if prefixes == ("",) else f", prefixes={literal(prefixes)}",
    }
    return _filled(MODEL, values)


def test_text(report: PortReport, nearest: ConfigComparison, hf: Mapping[str, Any], name: str) -> str:
    """Its parity test's file."""
    config = tiny_config(hf, nearest)
    lines = "".join(f"    {literal(key)}: {_value(value)},\n" for key, value in config.items())
    kind = literal(report.model_type or name)
    return _filled(TEST, {"name": name, "model_type": kind, "config": lines})


def tiny_config(hf: Mapping[str, Any], nearest: ConfigComparison) -> dict[str, Any]:
    """The checkpoint's config.json with small sizes and without special tokens."""
    kept = [
        *nearest.reading.reads,
        *nearest.reading.unread,
        *nearest.reading.unknown,
        *nearest.reading.renamed,
    ]
    kept += [key for key in nearest.reading.idle if hf[key] is False]
    kept += [refusal.key.partition(".")[0] for refusal in nearest.reading.refused]
    sizes = {key: size for field, size in _TINY.items() for key in MEANINGS[field]}
    heads = {hf.get(key) for key in MEANINGS["num_heads"]} - {None}
    found: dict[str, Any] = {}
    for key in sorted({key for key in kept if key in hf and key not in ("architectures", "model_type")}):
        value = hf[key]
        if key in sizes and isinstance(value, int) and not isinstance(value, bool):
            every_head = meaning_of(key) == "num_kv_heads" and value in heads
            value = _TINY["num_heads"] if every_head else 1 if _one_head(key, value) else sizes[key]
        elif isinstance(value, list) and len(value) > _TINY["num_layers"]:
            value = first_of_each(value, _TINY["num_layers"])
        found[key] = value
    return found | dict.fromkeys(_TOKENS)


def first_of_each(values: Sequence[Any], count: int) -> list[Any]:
    """``count`` of them, in order: the first of each value, so that few layers have every type."""
    some = values[:_MOST_LISTED]
    places = [place for place, value in enumerate(some) if value not in some[:place]][:count]
    others = (place for place in range(len(some)) if place not in places)
    return [some[place] for place in sorted([*places, *others][:count])]


def _one_head(key: str, value: int) -> bool:
    return meaning_of(key) == "num_kv_heads" and value == 1


def _value(value: Any) -> str:
    """A JSON value as Python code on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(str(k))}: {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return literal(value)


def _rule_lines(rules: Sequence[str]) -> Iterator[str]:
    """The rules' code, the head's by the config."""
    for rule in rules:
        head = _HEAD.fullmatch(rule)
        if head is None:
            yield rule
            continue
        stored = head[1] or head[2]
        yield "head_rule(config)" if stored == '"lm_head.weight"' else f"head_rule(config, {stored})"


def _items(points: Sequence[str], prefix: str) -> str:
    if not points:
        return "()"
    return "(\n" + "".join(f"    {literal(_ascii(prefix + point))},\n" for point in points) + ")"


def _ascii(text: str) -> str:
    return text.replace("×", "x")


def _comment(text: str) -> str:
    """Text from a file as part of a comment: on one line, in ASCII."""
    return literal(_ascii(text))[1:-1]


def _mapping(names: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{literal(a)}: {literal(b)}" for a, b in names.items()) + "}"


def _wrapped(names: Sequence[str]) -> str:
    return "".join(f"    # {_comment(name)}\n" for name in names)


def _fields(nearest: ConfigComparison) -> str:
    """The fields that the nearest architecture fills in, as comments."""
    config = nearest.reading.config
    if config is None:
        return ""
    ropes = {"rope": config.rope, "local_rope": config.local_rope}
    own = _changed(config) | {name: rope and _changed(rope) for name, rope in ropes.items()}
    own = {name: value for name, value in own.items() if name != "architecture" and value is not None}
    return "".join(f"    #   {name} = {_comment(str(value))}\n" for name, value in own.items())


def _changed(config: JsonConfig) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    values = {one.name: (getattr(config, one.name), one.default) for one in fields(config)}  # type: ignore[arg-type]
    return {name: value for name, (value, default) in values.items() if value != default}


def _filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its ``<<names>>`` filled in, in one pass: values are not looked at again."""
    return re.sub(r"<<(\w+)>>", lambda match: values[match[1]], template)
