"""Sizes in bytes as text: GB are powers of 1000, GiB of 1024."""

from __future__ import annotations

import re

from ingot.errors import ConfigError

_UNITS = {f"{unit}{i}": base**n for n, unit in enumerate("kmgt", 1) for i, base in (("", 1000), ("i", 1024))}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)b?", re.IGNORECASE)


def parse_size(text: str, field: str) -> int:
    """Bytes of ``24GiB``, ``24GB`` or ``24564 MiB``; GiB are powers of 1024, GB of 1000. Raises
    ``ConfigError`` if the text is not a size above zero; it names ``field``.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise ConfigError("not a size", seen=text, allowed="a number with its unit: 24GiB, 80GB", field=field)
    return size


def gib_text(num_bytes: float) -> str:
    """Bytes as ``parse_size`` reads them, for GPU memory: ``23.6GiB``."""
    return f"{num_bytes / 2**30:g}GiB"


def size_text(num_bytes: float) -> str:
    """Bytes for people: ``13.5 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
