"""JSON from files that others wrote.

Covers what such a text may be: how long and how deep, valid Unicode.

    data = load_json(folder / "config.json")       # JsonError is a ValueError
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MAX_DEPTH = 100  # levels; what walks over values recurses, and Python gives it a thousand calls
MAX_BYTES = 64 << 20  # of a file read whole: an index of 100,000 tensors has 10 MB
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """Not JSON, or more of it than Ingot reads; the text says why."""


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
    """All of a file, whose size is looked at first; errors as ``read_text``."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise JsonError(f"larger than {MAX_BYTES >> 20} MiB")
    return data


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        JsonError: it is not JSON, not UTF-8, nested too deeply, or holds half of a UTF-16 pair.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded)
        if _SURROGATE.search(decoded):  # escapes pass json.loads, and fail where the text is written
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise JsonError(_reason(error)) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _parts(outer) if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise _too_deep()


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> JsonError:
    return JsonError(f"nested more than {MAX_DEPTH} levels deep")


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"unpaired UTF-16 surrogate {error.object[error.start]!a}"
    return str(error)
