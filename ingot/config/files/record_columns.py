"""Names that data sets give to the columns we read: ``document`` for an article, ``sentence`` for a text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

MAIN = ("image", "conversations", "messages", "article", "prompt", "text", "token_ids")
REFERENCES = ("answer", "answers", "highlights", "summary")
_OF_MAIN = {
    "article": ("document", "dialogue"),
    "prompt": ("question",),
    "text": ("sentence", "transcription", "transcript", "normalized_text"),
}
_AUDIO = ("audio_filepath", "audio_path")
_FILE = "file_name"  # of AudioFolder and ImageFolder: a recording or a picture
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
KNOWN = frozenset((*MAIN, *REFERENCES, "audio", "captions", "caption", "image", *_AUDIO, _FILE, "abstract"))
KNOWN |= {alias for aliases in _OF_MAIN.values() for alias in aliases}


def renamed_columns(record: Mapping[str, Any]) -> dict[str, str]:
    """Our name of a field → the record's column that has it, for fields under another name."""
    found: dict[str, str] = {}
    file = record.get(_FILE)
    if isinstance(file, str) and not {"audio", "image"} & record.keys():
        found["image" if PurePosixPath(file).suffix.lower() in _PICTURES else "audio"] = _FILE
    if not any(field in record for field in MAIN):
        pairs = ((field, alias) for field, aliases in _OF_MAIN.items() for alias in aliases)
        found |= dict(islice((pair for pair in pairs if pair[1] in record), 1))
    if "audio" not in record and "audio" not in found:
        found |= dict(islice((("audio", alias) for alias in _AUDIO if alias in record), 1))
    has_article = "article" in record or "article" in found
    if has_article and "abstract" in record and not any(field in record for field in REFERENCES):
        found["highlights"] = "abstract"
    return found


def with_our_names(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The record with our names of its fields, and ``renamed_columns``."""
    renamed = renamed_columns(record)
    return {**record, **{field: record[column] for field, column in renamed.items()}}, renamed


def in_their_names(text: str, renamed: Mapping[str, str]) -> str:
    """A message about our fields, with the columns of the record in their place."""
    for field, column in renamed.items():
        text = re.sub(rf"^{field}\b", column, text)
    return text
