"""Reads JSON from untrusted files: limited in size and depth, valid Unicode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MAX_DEPTH = 100  # levels; code that walks values recurses, and Python allows a thousand calls
MAX_BYTES = 64 << 20  # of a file; an index of 100,000 tensors has 10 MB
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """Not JSON, or beyond a limit; the text says why."""


def load_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        JsonError: as ``parse_json``, and where the file is too large.
        OSError: the file cannot be read.
    """
    return parse_json(read_bytes(path))


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        JsonError: the file is too large.
        UnicodeDecodeError: it is not UTF-8. Both are ValueErrors.
        OSError: it cannot be read.
    """
    return read_bytes(path).decode("utf-8")


def read_bytes(path: Path) -> bytes:
    """All of a file, if it is not too large; errors as ``read_text``."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise JsonError(f"larger than {MAX_BYTES >> 20} MiB")
    return data


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ``JsonError`` if it is not JSON, not UTF-8, nested too deeply, or
    holds half of a UTF-16 pair.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded)
        if _SURROGATE.search(decoded):  # escapes pass json.loads, and fail where the text is written
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None
    except UnicodeEncodeError as error:
        raise JsonError(f"unpaired UTF-16 surrogate {error.object[error.start]!a}") from None
    except ValueError as error:
        raise JsonError(str(error)) from None
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, (dict, list))]
        if not level:
            return value
    raise JsonError(_TOO_DEEP)
