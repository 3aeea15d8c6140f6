"""Helpers for tests of engine folders: the hash of every file, and Python in another process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file; of verify.json without when the proof was made."""
    return {str(p.relative_to(folder)): _hash(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def _hash(path: Path) -> str:
    data = path.read_bytes()
    if path.name == "verify.json":
        notes = {name: value for name, value in json.loads(data).items() if name != "made"}
        data = json.dumps(notes).encode()
    return hashlib.sha256(data).hexdigest()


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )
