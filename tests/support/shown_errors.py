"""Errors in the words of the terminal, whose flags a test names.

with raises_shown(ConfigError, "fix: --calib"): ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ingot.cli.terminal.field_flags import flags_of, in_flags
from ingot.errors import IngotError


def as_shown(error: BaseException) -> str:
    """An error's text with flags in place of its fields."""
    text = str(error)
    if isinstance(error, IngotError) and error.fix == ", ".join(error.fields):
        text = text.removesuffix(error.fix) + flags_of(error.fields)
    return in_flags(text)


@contextmanager
def raises_shown(kind: type[BaseException], words: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """As ``pytest.raises`` with ``match``, on what the terminal shows."""
    with pytest.raises(kind) as caught:
        yield caught
    assert re.search(words, as_shown(caught.value)), as_shown(caught.value)
