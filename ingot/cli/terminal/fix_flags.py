"""The fixes of an out-of-memory error as flags.

Covers which of them a verb is shown.

    fixes_text(error.ledger["fixes"], takes={"--max-seq-len"})
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ingot.cli.terminal.field_flags import flag_of


def flags_text(changes: Mapping[str, Any]) -> str:
    """Changes of fields as on a command line."""
    return " ".join(f"{flag_of(name)} {_value(value)}" for name, value in changes.items())


def fixes_text(fixes: Sequence[Mapping[str, Any]], takes: Collection[str]) -> str:
    """The first fixes in one line.

    Args:
        fixes: as ``Fix.to_json`` gives them, the cheapest first.
        takes: the flags of the verb that failed. It is shown what it takes, and what another build takes.
    """
    from ingot.memory.fix_text import first_fixes

    return first_fixes(text for fix in fixes if (text := _shown(fix, takes)) is not None)


def _shown(fix: Mapping[str, Any], takes: Collection[str]) -> str | None:
    """A fix in words; None where the verb does not take it."""
    from ingot.memory.fix_text import BUILD_ALONE, LIMITS, cost_text

    changes = {} if fix["cost"] == "hardware" else fix["changes"]
    later = {name: value for name, value in changes.items() if flag_of(name) in takes}
    build = {name: value for name, value in changes.items() if name not in later}
    if not build.keys() <= {*BUILD_ALONE, *LIMITS}:
        return None
    first = f"`ingot build` with {flags_text(build)}" if build else ""
    return cost_text(fix, ", then ".join(filter(None, (first, flags_text(later)))))


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
