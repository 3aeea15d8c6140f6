"""A sweep's folder: points.jsonl, to which each point is appended as soon as it is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.config.files.atomic_write import atomic_file
from ingot.config.files.json_text import JsonError, parse_json
from ingot.errors import ConfigError

POINTS = "points.jsonl"
_SHOWN = 60
Record = dict[str, Any]


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / POINTS
        self.records: list[Record] = []

    def open(self, settings: Record, *, fresh: bool = False) -> None:
        """Make the folder and read its points, or with ``fresh`` discard them.

        Raises:
            ConfigError: the points have other settings, the file is damaged, or the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.records = [] if fresh else read_points(self.path)
            for record in self.records:
                check_same(record["settings"], settings, self.folder)
            with atomic_file(self.path) as part:  # without a last line that was cut off
                part.write_text("".join(json.dumps(r) + "\n" for r in self.records), encoding="utf-8")
        except OSError as error:
            raise ConfigError("the sweep's folder cannot be written", seen=error, field="out") from None

    def add(self, record: Record) -> None:
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_points(path: Path) -> list[Record]:
    """The records of a file, if there is one, without a last line that was cut off."""
    if not path.exists():
        return []
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return [_record(line, number, path) for number, line in enumerate(whole, start=1)]


def check_same(found: Record, wanted: Record, folder: Path) -> None:
    """Raise a ConfigError that names the settings that differ."""

    def plain(settings: Record, name: str) -> str:
        return json.dumps(settings.get(name), sort_keys=True)

    def short(settings: Record, name: str) -> str:
        return str(settings.get(name, "not given"))[:_SHOWN]

    names = sorted(name for name in found.keys() | wanted.keys() if plain(found, name) != plain(wanted, name))
    if names:
        changes = "; ".join(f"{name} {short(found, name)}, now {short(wanted, name)}" for name in names)
        raise ConfigError(
            f"{folder} holds points measured with different settings",
            seen=changes,
            fix="use another `out` folder, or `fresh` to start over",
        )


def _record(line: str, number: int, path: Path) -> Record:
    try:
        record = parse_json(line)
    except JsonError as error:
        raise _damaged(path, number, str(error)) from None
    if not isinstance(record, dict) or not {"line", "settings"} <= record.keys():
        raise _damaged(path, number, line[:_SHOWN])
    return record


def _damaged(path: Path, number: int, seen: str) -> ConfigError:
    return ConfigError(
        f"{path} line {number} is not a point of a sweep",
        seen=seen,
        field="fresh",
        fix="`fresh` to start over",
    )
