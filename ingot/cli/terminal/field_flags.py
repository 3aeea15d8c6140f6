"""The flags of the fields that errors, reports and fixes name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

_FLAGS: dict[str, tuple[str, ...]] = {
    "as_json": ("--json",),
    "at_least": ("--min",),
    "at_most": ("--max",),
    "checkpoint": ("CHECKPOINT",),
    "compression_ratio": ("--compression-ratio-threshold",),
    "engine": ("ENGINE",),
    "every": ("--all",),
    "files": ("FILE",),
    "group": ("--group-size",),
    "head": ("--quant-head",),
    "logprob": ("--logprob-threshold",),
    "n": ("-n",),
    "no_speech": ("--no-speech-threshold",),
    "output": ("-o", "--output"),
    "rotation": ("--rotate",),
    "scheme": ("--quant",),
    "stop_token_ids": ("--stop-token-id",),
    "suppress": ("--suppress-tokens",),
    "symmetric": ("--symmetric or --asymmetric",),
    "temperatures": ("--temperature",),
}  # where a field has several flags, the first that the verb takes
# Fields that no flag sets: they keep their names.
WITHOUT_FLAG = frozenset(
    (
        "chat_format",
        "grammar",
        "logit_bias",
        "logits_processors",
        "mode",
        "most",
        "pooling",
        "template_kwargs",
        "tools",
        "transcript",
        "vad",
    )
)
_NAMED = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")
_FIELD = re.compile(r"[a-z_]+")


def flag_of(field: str, takes: Collection[str] = ()) -> str:
    """The flag of a field, of several one that the verb ``takes``; the field itself where it has none."""
    if field in WITHOUT_FLAG or not _FIELD.fullmatch(field):
        return field
    flags = _FLAGS.get(field, ("--" + field.replace("_", "-"),))
    return next((flag for flag in flags if flag in takes), flags[0])


def flags_of(fields: Iterable[str], takes: Collection[str] = ()) -> str:
    """The flags of fields; the fields themselves where the verb does not take the flag."""
    flags = ((field, flag_of(field, takes)) for field in fields)
    return ", ".join(
        field if takes and flag[:1] == "-" and flag not in takes else flag for field, flag in flags
    )


def in_flags(text: str, takes: Collection[str] = ()) -> str:
    """A text with flags for its fields in backticks: `dtype=bf16` becomes --dtype bf16."""

    def written(match: re.Match[str]) -> str:
        field, value = match.groups()
        flag = flag_of(field, takes)
        if flag == field:
            return match[0]
        if value is None or value == "True":
            return flag
        return "--no-" + flag.removeprefix("--") if value == "False" else f"{flag} {value}"

    return _NAMED.sub(written, text)


def flags_text(changes: Mapping[str, Any]) -> str:
    """Changes of fields as on a command line."""
    return " ".join(
        f"{flag_of(name)} {f'{value:g}' if isinstance(value, float) else value}"
        for name, value in changes.items()
    )


def fixes_text(fixes: Sequence[Mapping[str, Any]], takes: Collection[str]) -> str:
    """The first of ``fixes`` (as ``Fix.to_json``, cheapest first) that the verb or a new build ``takes``."""
    from ingot.memory.fix_text import first_fixes

    return first_fixes(text for fix in fixes if (text := _shown(fix, takes)) is not None)


def _shown(fix: Mapping[str, Any], takes: Collection[str]) -> str | None:
    """A fix in words; None if neither the verb nor a build takes it."""
    from ingot.memory.fix_text import BUILD_ALONE, LIMITS, cost_text

    changes = {} if fix["cost"] == "hardware" else fix["changes"]
    later = {name: value for name, value in changes.items() if flag_of(name) in takes}
    build = {name: value for name, value in changes.items() if name not in later}
    if not build.keys() <= {*BUILD_ALONE, *LIMITS}:
        return None
    first = f"`ingot build` with {flags_text(build)}" if build else ""
    return cost_text(fix, ", then ".join(filter(None, (first, flags_text(later)))))
