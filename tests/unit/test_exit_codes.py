"""Which errors are the command line's fault, and which the work's."""

from __future__ import annotations

import pickle

import pytest

from ingot.cli.main import _exit_code
from ingot.errors import (
    BuildError,
    ConfigError,
    EngineError,
    IngotError,
    NoSuchPathError,
    OutOfMemoryError,
    RequestError,
)


@pytest.mark.parametrize(
    ("error", "verb", "code"),
    [
        (ConfigError("too large", field="max_seq_len"), "run", 2),
        (ConfigError("too large", fix="a shorter prompt"), "run", 1),
        (OutOfMemoryError("too little memory", fix="--memory-fraction 0.9"), "run", 1),
        (BuildError("the engine exists", fix="--force"), "build", 1),
        (NoSuchPathError("no such folder"), "run", 2),
        (ConfigError("damaged"), "diff", 2),
    ],
)
def test_exit_codes(error: IngotError, verb: str, code: int) -> None:
    assert _exit_code(error, verb) == code


@pytest.mark.parametrize(
    "words", ["--data", "use --data FILE", "leave out --raw", "temperature", "another file"]
)
def test_the_words_of_a_fix_do_not_decide(words: str) -> None:
    for kind in (ConfigError, RequestError, EngineError):
        assert _exit_code(kind("wrong", field="data", fix=words), "run") == 2
        assert _exit_code(kind("wrong", fix=words), "run") == 1


def test_a_misuse_is_one_after_a_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("wrong", field="data")))
    assert (error.fix, error.field) == ("data", "data")
