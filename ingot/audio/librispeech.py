"""Recordings and transcripts of folders in LibriSpeech's layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError

TRANSCRIPTS = "*.trans.txt"


def transcripts(folder: Path) -> list[Path]:
    """The files of transcripts, at any depth; raises ``ConfigError`` where there is none."""
    found = sorted(folder.rglob(TRANSCRIPTS))
    if not found:
        raise ConfigError(
            "the folder has no transcripts",
            seen=folder,
            allowed=f"LibriSpeech's layout: {TRANSCRIPTS} beside its .flac files; or a manifest in .jsonl",
            field="data",
        )
    return found


def librispeech(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """A record for each utterance, numbered from 1; paths of recordings are relative to the folder."""
    number = 0
    for file in transcripts(folder):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, text = line.strip().partition(" ")
            if name:
                number += 1
                audio = (file.parent / f"{name}.flac").relative_to(folder)
                yield number, {"id": name, "audio": str(audio), "text": text, "language": "en"}
