"""Sizes in bytes, as people write them.

Covers the translations. GB are powers of 1000, GiB of 1024, in every text of Ingot.

    parse_size("24GiB", "gpu")     # 25769803776
    size_text(13_500_000)   # 13.5 MB
"""

from __future__ import annotations

import re

from ingot.errors import ConfigError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)b?", re.IGNORECASE)


def parse_size(text: str, field: str) -> int:
    """Bytes of ``24GiB``, ``24GB`` or ``24564 MiB``; GiB are powers of 1024, GB of 1000.

    Raises:
        ConfigError: the text is no size above zero; ``field`` is named as what to change.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise ConfigError("not a size", seen=text, allowed="a number with its unit: 24GiB, 80GB", field=field)
    return size


def gib_text(num_bytes: float) -> str:
    """Bytes as ``parse_size`` reads them back: ``23.6GiB`` (powers of 1024), for memory of a card."""
    return f"{num_bytes / 2**30:g}GiB"


def size_text(num_bytes: float) -> str:
    """Bytes for people: ``13.5 MB`` (powers of 1000)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
