"""The fixes of an out-of-memory error in words of Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BUILD_ALONE = ("dtype", "quant")
LIMITS = ("max_batch_size", "max_seq_len")
_SHOWN = 3
_LAST = "stop other processes that use the device's memory"


def where_of(changes: Mapping[str, Any]) -> str:
    """What takes a fix's changes: arguments of ``LLM`` or ``RuntimeConfig``, or another build."""
    if not changes or "gpu" in changes:
        return "the machine"
    named = {name: f"{name}={value!r}" for name, value in changes.items()}
    built = [text for name, text in named.items() if name in BUILD_ALONE]
    limits = [text for name, text in named.items() if name in LIMITS]
    runtime = [text for name, text in named.items() if name not in (*LIMITS, *BUILD_ALONE)]
    parts = [f"build({', '.join(built)})"] if built else []
    config = f"RuntimeConfig({', '.join(runtime)})"
    if limits:
        parts.append(f"LLM({', '.join([*limits, *([f'runtime={config}'] if runtime else [])])})")
    elif runtime:
        parts.append(config)
    return ", ".join(parts)


def fixes_in_python(fixes: Sequence[Mapping[str, Any]]) -> str:
    """The first fixes in one line, from ``Fix.to_json``'s data, cheapest first."""
    return first_fixes(cost_text(fix, fix["where"]) for fix in fixes)


def cost_text(fix: Mapping[str, Any], change: str) -> str:
    """A change and what it costs; for hardware the fix's own note."""
    return f"{fix['note'] if fix['cost'] == 'hardware' else change} (costs {fix['cost']})"


def first_fixes(texts: Iterable[str]) -> str:
    """The first of them, or the last resort if there are none."""
    return " or ".join(list(texts)[:_SHOWN] or [_LAST])
