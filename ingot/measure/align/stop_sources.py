"""The ids that end an original's answers, as its files and traces say.

It shares no code with the engine's own derivation, which it is compared with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_files import CONFIG, read_json
from ingot.checkpoint.checkpoint_reader import GENERATION_CONFIG
from ingot.config.files.json_text import parse_json
from ingot.errors import CheckpointError

_TIKTOKEN = "qwen.tiktoken"


def stop_ids_of_files(folder: Path) -> tuple[int, ...]:
    """The ids that end ``generate``: ``eos_token_id`` of generation_config.json, or without one of
    config.json. Qwen v1's ``chat`` ends at <|im_end|> and <|im_start|> too (its ``get_stop_words_ids``), the
    second and third id after the ranks of its tokenizer.

    Raises:
        CheckpointError: a file cannot be read, or an id is not an integer.
    """
    path = folder / GENERATION_CONFIG
    generation = read_json(path) if path.is_file() else None
    named = (read_json(folder / CONFIG) if generation is None else generation).get("eos_token_id")
    ids = _ids(named, path)
    ranks = folder / _TIKTOKEN
    if generation is not None and generation.get("chat_format") == "chatml" and ranks.is_file():
        count = sum(bool(line.strip()) for line in ranks.read_bytes().splitlines())
        ids = (*ids, count + 1, count + 2)
    return ids


def stop_ids_of_trace(metadata: dict[str, str], path: Path) -> tuple[int, ...] | None:
    """The ids in a trace's metadata, or None."""
    noted = metadata.get("stop_ids")
    if noted is None:
        return None
    try:
        return _ids(parse_json(noted), path)
    except ValueError:
        raise _no_ids(noted, path) from None


def _ids(named: Any, path: Path) -> tuple[int, ...]:
    listed = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise _no_ids(named, path)
    return tuple(listed)


def _no_ids(seen: object, path: Path) -> CheckpointError:
    return CheckpointError(
        "stop ids must be an id or a list of ids", seen=f"{path}: {seen}", allowed="2 or [2, 5]"
    )
