"""Folders of pictures, with or without captions.

Covers which files are pictures, and the layout of cc_sbu_align: ``filter_cap.json`` beside ``image/``.
Decodes nothing.

    for number, record in picture_records(Path("cc_sbu_align")): record["image"], record.get("text")
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.config.files.json_text import JsonError, load_json
from ingot.errors import ConfigError

CAPTIONS = "filter_cap.json"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_LAYOUTS = f"pictures ({', '.join(SUFFIXES)}), or {CAPTIONS} beside image/ as in cc_sbu_align"


def picture_files(folder: Path, field: str = "data") -> list[Path]:
    """What decides the records: the file of captions, or the pictures at any depth, sorted.

    Args:
        field: what named the folder, for errors.

    Raises:
        ConfigError: there is neither.
    """
    if (folder / CAPTIONS).is_file():
        return [folder / CAPTIONS]
    found = sorted(one for one in folder.rglob("*") if one.suffix.lower() in SUFFIXES and one.is_file())
    if not found:
        raise ConfigError("the folder has no pictures", seen=folder, allowed=_LAYOUTS, field=field)
    return found


def picture_records(folder: Path, field: str = "data") -> Iterator[tuple[int, dict[str, Any]]]:
    """A record for each picture, numbered from 1; files are named from the folder on.

    Raises:
        ConfigError: as ``picture_files``, or the file of captions is of another shape.
    """
    files = picture_files(folder, field)
    if files[0].name != CAPTIONS:
        names = (str(file.relative_to(folder)) for file in files)
        yield from enumerate(({"id": name, "image": name} for name in names), start=1)
        return
    try:
        listed = load_json(files[0])
        pairs = [(str(one["image_id"]), one["caption"]) for one in listed["annotations"]]
    except (JsonError, OSError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{CAPTIONS} holds no captions",
            seen=f"{files[0]}: {error!r}"[:200],
            allowed='{"annotations": [{"image_id": "…", "caption": "…"}, …]}',
            field=field,
        ) from None
    for number, (name, caption) in enumerate(pairs, start=1):
        yield number, {"id": name, "image": _of_id(folder, name), "text": caption}


def _of_id(folder: Path, name: str) -> str:
    """The picture of an id, whatever its ending."""
    files = [f"image/{name}{suffix}" for suffix in SUFFIXES]
    return next((file for file in files if (folder / file).is_file()), files[0])
