"""The version of Ingot, which every engine records, and those of other packages."""

from __future__ import annotations

VERSION = "0.1.0"


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    from importlib import metadata  # 20 ms, which a start has no use for

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
