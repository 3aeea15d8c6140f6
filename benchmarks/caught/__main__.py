"""Plants the bugs of other engines one at a time and runs the command of Ingot that finds each.

python -m benchmarks.caught                     # all ten
python -m benchmarks.caught kv-cache bos        # some
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import typer.testing

from benchmarks.caught.bugs import BUGS, Bug
from ingot.cli.main import app

WIDTH = "160"  # columns, so that no line is cut


@dataclass(frozen=True)
class Printed:
    """What a command printed, and its exit code."""

    exit_code: int
    text: str


class Folders:
    """Folders in which commands run, copies of what is prepared once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._prepared: dict[tuple[object, bool], Path] = {}

    def copy(self, bug: Bug, *, planted: bool) -> Path:
        """A folder for one command."""
        key = (bug.prepare, planted and bug.in_files)
        if key not in self._prepared:
            self._prepared[key] = Path(tempfile.mkdtemp(dir=self._root))
            bug.prepare(self._prepared[key], key[1])
        folder = Path(tempfile.mkdtemp(dir=self._root))
        return Path(shutil.copytree(self._prepared[key], folder, symlinks=True, dirs_exist_ok=True))


def run(bug: Bug, folders: Folders, *, planted: bool) -> Printed:
    """Run a bug's command in a folder of its own, with the bug or without it."""
    folder = folders.copy(bug, planted=planted)
    words = [*shlex.split(bug.command)[1:], *(() if "explain" in bug.command else ("--device", "cpu"))]
    with patch.dict(os.environ, COLUMNS=WIDTH), bug.plant() if planted else nullcontext(), chdir(folder):
        result = typer.testing.CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Printed(result.exit_code, result.output)


def is_found(bug: Bug, printed: Printed) -> bool:
    """Whether a command has found its bug and said so."""
    return printed.exit_code == bug.exit_code and bug.words in printed.text


def passes(bug: Bug, printed: Printed) -> bool:
    """Whether a command had nothing to say of a sound engine."""
    return printed.exit_code == 0 and bug.words not in printed.text


def main() -> None:
    """Run some bugs; exit with 1 if one is not found, or a sound engine is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.caught",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(bug.name for bug in BUGS))
    names = parser.parse_args().names or [bug.name for bug in BUGS]
    unknown = sorted({*names} - {bug.name for bug in BUGS})
    if unknown:
        parser.error(f"no such bug: {', '.join(unknown)}; there are {', '.join(bug.name for bug in BUGS)}")
    with tempfile.TemporaryDirectory() as root:
        folders = Folders(Path(root))
        missed = [bug.name for bug in BUGS if bug.name in names and not _shown(bug, folders)]
    if missed:
        sys.exit(f"not as promised: {', '.join(missed)}")


def _shown(bug: Bug, folders: Folders) -> bool:
    """Print what a command says with the bug; returns whether it is found, and a sound engine passes."""
    start = time.perf_counter()
    right, wrong = run(bug, folders, planted=False), run(bug, folders, planted=True)
    found, sound = is_found(bug, wrong), passes(bug, right)
    verdict = ("found" if found else "NOT FOUND") + ("" if sound else ", but a sound engine does not pass")
    print(f"== {bug.name}: {verdict}, {time.perf_counter() - start:.1f} s")
    print(f"$ {bug.command}\n{wrong.text if sound else right.text}", flush=True)
    return found and sound


if __name__ == "__main__":
    main()
