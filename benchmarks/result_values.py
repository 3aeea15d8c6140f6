"""Values of the JSON files in docs/results, and how many of their digits a table shows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def value_at(file: str, path: str = "", results: Path = RESULTS) -> Any:
    """What a JSON file holds under keys and places joined by dots; without a path, all of it.

    Raises:
        KeyError: no such file or path; it names both.
    """
    try:
        found = json.loads((results / file).read_text(encoding="utf-8"))
        for key in path.split(".") if path else ():
            found = found[int(key)] if isinstance(found, list) else found[key]
    except (OSError, LookupError, ValueError, TypeError) as error:
        raise KeyError(f"{file} {path}: {error}") from None
    return found


def significant(value: float, digits: int = 3) -> str:
    """So many digits that count, whole numbers whole: 2.63, 12.2, 746, 6230."""
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    # 9.996 rounds to 10.0, which has a digit more before the point.
    places = digits - 1 - math.floor(math.log10(abs(round(value, places))))
    return f"{value:.{max(places, 0)}f}"
