"""The package's folders: a reader takes one in at a glance, and a file's name says where it is."""

from __future__ import annotations

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
