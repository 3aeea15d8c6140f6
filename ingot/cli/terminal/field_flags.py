"""The flags of the fields that errors and reports name.

Covers the names that differ from ``max_seq_len`` → ``--max-seq-len``.

    in_flags("build with `dtype=bf16`")     # "build with --dtype bf16"
    flag_of("temperatures")                 # "--temperature"
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_FLAGS: dict[str, tuple[str, ...]] = {
    "as_json": ("--json",),
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
    """The flag of a field; the field itself where it has none.

    Args:
        takes: the flags of the verb that runs.
    """
    if field in WITHOUT_FLAG or not _FIELD.fullmatch(field):
        return field
    flags = _FLAGS.get(field, ("--" + field.replace("_", "-"),))
    return next((flag for flag in flags if flag in takes), flags[0])


def flags_of(fields: Iterable[str], takes: Collection[str] = ()) -> str:
    """The flags of fields at fault; of those that the verb does not take, the fields."""
    flags = ((field, flag_of(field, takes)) for field in fields)
    return ", ".join(
        field if takes and flag[:1] == "-" and flag not in takes else flag for field, flag in flags
    )


def in_flags(text: str, takes: Collection[str] = ()) -> str:
    """A text with the flags of the fields that stand in backticks, with their values."""

    def written(match: re.Match[str]) -> str:
        field, value = match.groups()
        flag = flag_of(field, takes)
        if flag == field:
            return match[0]
        if value is None or value == "True":
            return flag
        return "--no-" + flag.removeprefix("--") if value == "False" else f"{flag} {value}"

    return _NAMED.sub(written, text)
