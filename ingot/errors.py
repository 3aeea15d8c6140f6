"""The exceptions that reach users: what happened, the value seen, the values allowed, what to change.

A value to change is named by its parameter or field, in texts within backticks (`max_seq_len`, `dtype=bf16`);
the
terminal prints flags there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Control characters, except line ends and tabs, and marks of reading direction.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MOST_SHOWN = 4000  # characters of one value


class IngotError(Exception):
    """Base of every error meant for users.

    Args:
        what: what happened, one sentence without a full stop.
        seen: the value that was found.
        allowed: the values that would have been accepted.
        fix: what to do; by default the fields.
        field: the parameter or field at fault, or several. With one the call is at fault, so the terminal
            exits with 2.
    """

    def __init__(
        self,
        what: str,
        *,
        seen: object = None,
        allowed: object = None,
        fix: str | None = None,
        field: str | tuple[str, ...] | None = None,
    ) -> None:
        self.what = what
        self.seen = seen
        self.allowed = allowed
        self.fields = (field,) if isinstance(field, str) else tuple(field or ())
        self.fix = ", ".join(self.fields) or None if fix is None else fix
        super().__init__(str(self))

    @property
    def field(self) -> str | None:
        """The parameter or field at fault; None: there is none, or more than one."""
        return self.fields[0] if len(self.fields) == 1 else None

    def __str__(self) -> str:
        parts = [shown(self.what)]
        if self.seen is not None:
            parts.append(f"seen: {shown(self.seen)}")
        if self.allowed is not None:
            parts.append(f"allowed: {shown(self.allowed)}")
        if self.fix is not None:
            parts.append(f"to fix: {shown(self.fix)}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.seen, self.allowed, self.fix), {"fields": self.fields}


def printable(text: str) -> str:
    """The text with characters that steer a terminal escaped: names and values are from files of others."""
    return _STEERING.sub(lambda match: ascii(match[0])[1:-1], text)


def to_install(extras: str) -> str:
    """How optional packages are installed; ``extras``: "serve,speech"."""
    return f"pip install -c constraints.txt '.[{extras}]' in Ingot's folder"


def shown(value: object) -> str:
    """A value as an error shows it: printable, and cut to a screen."""
    text = str(value)
    if len(text) > _MOST_SHOWN:
        text = f"{text[:_MOST_SHOWN]}… ({len(text)} characters)"
    return printable(text)


def _rebuild(kind: type[IngotError], what: str, seen: object, allowed: object, fix: str | None) -> IngotError:
    return kind(what, seen=seen, allowed=allowed, fix=fix)


class ConfigError(IngotError):
    """A configuration value is unknown, missing or out of range."""


class CheckpointError(IngotError):
    """A checkpoint cannot be read: missing, truncated, unsafe or of an unknown kind."""


class TokenizerError(IngotError):
    """Tokenizer files or a chat template cannot be read or used."""


class BuildError(IngotError):
    """An engine could not be built; nothing was written."""


class EngineError(IngotError):
    """An engine folder cannot be loaded: missing, damaged or of another format version."""


class NoSuchPathError(CheckpointError, EngineError):
    """A path or id that the user gave does not exist, or is something else than it should be."""


class RequestError(IngotError, ValueError):
    """A prompt or a sampling value cannot be served."""


class DeviceError(IngotError):
    """The machine lacks what was asked for."""


class OutOfMemoryError(DeviceError):
    """The device has too little memory for what was asked.

    Args:
        ledger: bill, capacity and every fix, as JSON types (docs/memory.md); None: nothing was counted.
        lines: the same for people.
    """

    def __init__(
        self,
        what: str,
        *,
        seen: object = None,
        allowed: object = None,
        fix: str | None = None,
        ledger: Mapping[str, Any] | None = None,
        lines: tuple[str, ...] = (),
    ) -> None:
        self.ledger = ledger
        self.lines = lines
        super().__init__(what, seen=seen, allowed=allowed, fix=fix)

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.lines])

    def __reduce__(self) -> tuple[object, ...]:
        state = {"ledger": self.ledger, "lines": self.lines}
        return _rebuild, (type(self), self.what, self.seen, self.allowed, self.fix), state
