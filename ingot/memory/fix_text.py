"""The fixes of an out-of-memory error in words: flags for a terminal, arguments for Python.

Covers which flags go into a build and which arguments are theirs.

    told_fixes(error.ledger["fixes"], takes={"--max-seq-len"})
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

_BUILD_ALONE = ("--dtype", "--quant")
_LIMITS = ("--max-batch-size", "--max-seq-len")
_SHOWN = 3
_LAST = "stop other processes that use the device's memory"


def where_of(flags: str) -> str:
    """What takes a fix's flags in Python: arguments of ``LLM`` or ``RuntimeConfig``, or another build."""
    pairs = _pairs(flags)
    if not pairs or any(flag == "--gpu" for flag, _ in pairs):
        return "the machine"
    named = [(flag, f"{flag[2:].replace('-', '_')}={_value(value)}") for flag, value in pairs]
    limits = [text for flag, text in named if flag in _LIMITS]
    runtime = ", ".join(text for flag, text in named if flag not in (*_LIMITS, *_BUILD_ALONE))
    if limits and runtime:
        limits.append(f"runtime=RuntimeConfig({runtime})")
    parts = ["ingot build"] if any(flag in _BUILD_ALONE for flag, _ in pairs) else []
    if limits:
        parts.append(f"LLM({', '.join(limits)})")
    elif runtime:
        parts.append(f"RuntimeConfig({runtime})")
    return ", ".join(parts)


def _value(text: str) -> str:
    """A flag's value in Python: numbers as they are, words in quotes."""
    return text if text.replace(".", "", 1).isdigit() else repr(text)


def told_fixes(fixes: Sequence[Mapping[str, Any]], takes: Collection[str] | None = None) -> str:
    """The first fixes in one line.

    Args:
        fixes: as ``Fix.to_json`` gives them, the cheapest first.
        takes: the flags of the verb that failed, whose fixes alone are shown; None: of a failure in Python.
    """
    texts = [text for fix in fixes if (text := _fix_text(fix, takes)) is not None]
    return " or ".join(texts[:_SHOWN] or [_LAST])


def _fix_text(fix: Mapping[str, Any], takes: Collection[str] | None) -> str | None:
    """A fix in words; None where the verb has no such flag."""
    flags, cost = fix["flags"], fix["cost"]
    if cost == "hardware":
        return f"{fix['note']} (costs {cost})"
    if takes is None:
        return f"{flags} ({fix['where']}; costs {cost})"
    pairs = _pairs(flags)
    later = " ".join(f"{flag} {value}" for flag, value in pairs if flag in takes)
    build = " ".join(f"{flag} {value}" for flag, value in pairs if flag not in takes)
    if any(flag not in (*_BUILD_ALONE, *_LIMITS) for flag, _ in pairs if flag not in takes):
        return None
    first = f"`ingot build` with {build}" if build else ""
    return f"{', then '.join(filter(None, (first, later)))} (costs {cost})"


def _pairs(flags: str) -> list[tuple[str, str]]:
    words = flags.split()
    return list(zip(words[::2], words[1::2], strict=True))
