"""Values of a config.json, each checked for type and range; errors name the key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from ingot.errors import CheckpointError

HfConfig = Mapping[str, Any]
_LONGEST = 60  # characters of a value in a message


def integer(hf: HfConfig, *keys: str, default: int | None = None) -> int:
    """A positive integer under the first of these keys that the config has.

    Raises:
        CheckpointError: it is none, or there is neither a key nor a default.
    """
    key, value = _found(hf, keys, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise refused(key, value, "a positive integer")
    return value


def number(hf: HfConfig, *keys: str, default: float | None = None) -> float:
    """A positive finite number; arguments and errors as of ``integer``."""
    key, value = _found(hf, keys, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise refused(key, value, "a positive number")
    return float(value)


def flag(hf: HfConfig, key: str, default: bool) -> bool:
    """true or false; null is the default.

    Raises:
        CheckpointError: it is something else.
    """
    value = hf.get(key)
    if value is not None and not isinstance(value, bool):
        raise refused(key, value, "true or false")
    return default if value is None else value


def optional_integer(hf: HfConfig, key: str) -> int | None:
    """``integer`` of a key that may be missing or null."""
    return None if hf.get(key) is None else integer(hf, key)


def head_size(hidden_size: int, heads: int) -> int:
    """Channels per attention head of a model whose heads share the hidden size.

    Raises:
        CheckpointError: they do not divide it.
    """
    if hidden_size % heads:
        raise CheckpointError(
            "the hidden size is not a multiple of the number of attention heads",
            seen=f"{hidden_size} and {heads}",
            fix="correct config.json, or download it again",
        )
    return hidden_size // heads


def check_dtype(hf: HfConfig) -> None:
    """Raises:
    CheckpointError: ``dtype`` or ``torch_dtype`` names no dtype.
    """
    for key in ("dtype", "torch_dtype"):
        value = hf.get(key)
        name = str(value).removeprefix("torch.")
        if value not in (None, "auto") and not isinstance(getattr(torch, name, None), torch.dtype):
            raise refused(key, value, "float16, bfloat16 or float32")


def check_end_tokens(hf: HfConfig, vocab_size: int, file: str) -> None:
    """Refuse an ``eos_token_id`` outside the vocabulary: no answer would ever end with it.

    Ids of other special tokens are not read, and are often meaningless (-1, or one past the vocabulary for a
    padding token that was never added).

    Raises:
        CheckpointError: it is outside.
    """
    value = hf.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
        raise refused("eos_token_id", value, f"0 to {vocab_size - 1}, a list of such ids, or null", file)


def refused(key: str, value: object, allowed: str, file: str = "config.json") -> CheckpointError:
    return CheckpointError(
        f"{key} in {file} is not valid",
        seen=short(value),
        allowed=allowed,
        fix=f"correct {file}, or download it again",
    )


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _found(hf: HfConfig, keys: tuple[str, ...], default: Any = None) -> tuple[str, Any]:
    for key in keys:
        if hf.get(key) is not None:
            return key, hf[key]
    if default is not None:
        return keys[0], default
    raise CheckpointError(
        f"config.json lacks {' or '.join(keys)}", seen=sorted(map(str, hf)), fix="download config.json again"
    )
