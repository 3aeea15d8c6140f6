"""Whisper's settings in generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.checkpoint.checkpoint_reader import GENERATION_CONFIG
from ingot.models.hf_values import refused

_MOST = 1 << 31  # no vocabulary has so many


@dataclass(frozen=True)
class SpeechGeneration:
    """None: the file lacks it, or says null.

    Attributes:
        suppress: ids that never occur (``suppress_tokens``), of those that the model has: in small models
            Hugging Face leaves ids of the published ones.
        begin_suppress: ids that no text begins with (``begin_suppress_tokens``).
        languages: token by code (``lang_to_id``).
        multilingual: whether prompts name language and task (``is_multilingual``).
        last_first: the latest timestamp that a window may begin with, counted from 0 seconds
            (``max_initial_timestamp_index``).
    """

    suppress: tuple[int, ...] | None = None
    begin_suppress: tuple[int, ...] | None = None
    languages: Mapping[str, int] | None = None
    multilingual: bool | None = None
    last_first: int | None = None

    @classmethod
    def of(cls, generation: Mapping[str, Any], vocab_size: int) -> SpeechGeneration:
        """Read generation_config.json.

        Raises:
            CheckpointError: a value is of the wrong type, or a language has a token that the model lacks.
        """
        multilingual, last = (generation.get(k) for k in ("is_multilingual", "max_initial_timestamp_index"))
        if multilingual is not None and not isinstance(multilingual, bool):
            raise refused("is_multilingual", multilingual, "true or false", GENERATION_CONFIG)
        if last is not None and not _is_id(last, vocab_size):
            allowed = f"0 to {vocab_size - 1}"
            raise refused("max_initial_timestamp_index", last, allowed, GENERATION_CONFIG)
        return cls(
            _ids(generation, "suppress_tokens", vocab_size),
            _ids(generation, "begin_suppress_tokens", vocab_size),
            _languages(generation, vocab_size),
            multilingual,
            last,
        )


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _ids(generation: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...] | None:
    found = generation.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not all(_is_id(one, _MOST) for one in found):
        raise refused(key, found, "a list of token ids, or null", GENERATION_CONFIG)
    return tuple(one for one in found if one < vocab_size)


def _languages(generation: Mapping[str, Any], vocab_size: int) -> dict[str, int] | None:
    found = generation.get("lang_to_id")
    if found is None:
        return None
    named = isinstance(found, dict) and all(
        isinstance(name, str) and name[:2] == "<|" and name[-2:] == "|>" and _is_id(token, vocab_size)
        for name, token in found.items()
    )
    if not named:
        allowed = f'{{"<|en|>": 50259, …}}, ids from 0 to {vocab_size - 1}'
        raise refused("lang_to_id", found, allowed, GENERATION_CONFIG)
    return {name[2:-2]: token for name, token in found.items()}
