"""Which errors are the command line's fault, and which the work's."""

from __future__ import annotations

import pytest

from ingot.cli.main import _exit_code
from ingot.errors import BuildError, ConfigError, IngotError, NoSuchPathError, OutOfMemoryError


@pytest.mark.parametrize(
    ("error", "verb", "code"),
    [
        (ConfigError("too large", fix="--max-seq-len 8"), "run", 2),
        (ConfigError("too large", fix="a shorter prompt"), "run", 1),
        (OutOfMemoryError("too little memory", fix="--memory-fraction 0.9"), "run", 1),
        (BuildError("the engine exists", fix="--force"), "build", 1),
        (NoSuchPathError("no such folder"), "run", 2),
        (ConfigError("damaged"), "diff", 2),
    ],
)
def test_exit_codes(error: IngotError, verb: str, code: int) -> None:
    assert _exit_code(error, verb) == code
