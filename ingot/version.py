"""The version of Ingot, which every engine records, and those of other packages."""

from __future__ import annotations

from importlib import metadata

VERSION = "0.1.0"


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
