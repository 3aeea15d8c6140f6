"""Folders of pictures, with or without captions (cc_sbu_align's layout)."""

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
    """The file of captions, or the pictures at any depth, sorted; raises ``ConfigError`` where there is
    neither. ``field`` named the folder, for errors.
    """
    if (folder / CAPTIONS).is_file():
        return [folder / CAPTIONS]
    found = sorted(one for one in folder.rglob("*") if one.suffix.lower() in SUFFIXES and one.is_file())
    if not found:
        raise ConfigError("the folder has no pictures", seen=folder, allowed=_LAYOUTS, field=field)
    return found


def picture_records(folder: Path, field: str = "data") -> Iterator[tuple[int, dict[str, Any]]]:
    """A record for each picture, numbered from 1; paths are relative to the folder. Raises as
    ``picture_files``, and where the file of captions is invalid.
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
        paths = [f"image/{name}{suffix}" for suffix in SUFFIXES]
        image = next((path for path in paths if (folder / path).is_file()), paths[0])
        yield number, {"id": name, "image": image, "text": caption}
