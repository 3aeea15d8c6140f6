"""The package's folders and names: a reader takes a folder in at a glance, and a name says what it is."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import ingot

FILES = [
    path
    for path in Path(ingot.__file__).parent.rglob("*.py")
    if not path.stem.startswith("__")  # __init__, __main__
]


def test_no_folder_has_more_than_20_files() -> None:
    counts = Counter(str(path.parent.relative_to(Path(ingot.__file__).parent)) for path in FILES)
    assert len(counts) > 50
    assert {folder: count for folder, count in counts.items() if count > 20} == {}


def test_no_file_name_repeats() -> None:
    assert [name for name, count in Counter(path.name for path in FILES).items() if count > 1] == []


def test_no_public_class_name_repeats() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FILES]
    names = Counter(name for text in texts for name in re.findall(r"^class ([A-Z]\w*)", text, re.MULTILINE))
    assert len(names) > 500
    assert [name for name, count in names.items() if count > 1] == []
