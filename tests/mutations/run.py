"""Plants one bug after another into a copy of the repository and runs the tests that should catch it.

Owns the copy and the verdicts. The bugs are data, in the TOML files beside this one:

    [[mutation]]
    name = "margin always true"
    file = "ingot/llm/replay.py"
    text = "if margin <= 2 * FACTOR * floor.logprobs:"      # once in the file
    becomes = "if True:"
    tests = ["tests/e2e/test_replay.py"]                    # files or test ids

    python -m tests.mutations.run                 # all
    python -m tests.mutations.run runtime quant   # files by name, or mutations by a part of their name

A bug is caught where a test fails. Tests run without INGOT_TEST_DATA: what matters is tested with what ships.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PASSED, FAILED = 0, 1  # pytest's exit codes
LIMIT = 300  # seconds of one run; a loop without end is caught, too


@dataclass(frozen=True)
class Mutation:
    """One bug: ``text``, which is once in ``file``, becomes something else; ``tests`` should fail."""

    name: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    source: str  # the TOML file's name without its ending


def read_all(folder: Path = HERE) -> list[Mutation]:
    """Every mutation of the folder's TOML files."""
    return [
        Mutation(**entry | {"tests": tuple(entry["tests"])}, source=path.stem)
        for path in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    ]


def wanted(mutations: Sequence[Mutation], names: Sequence[str]) -> list[Mutation]:
    """Those of the files, or with a part of their name, among ``names``; all where there are none."""
    sources = {m.source for m in mutations}
    parts = [name for name in names if name not in sources]
    return [m for m in mutations if not names or m.source in names or any(part in m.name for part in parts)]


def copy_repository(to: Path) -> None:
    """The files that git knows or does not ignore, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def applies(mutation: Mutation, root: Path) -> bool:
    """Whether the text is in the file, once."""
    path = root / mutation.file
    return path.is_file() and path.read_text(encoding="utf-8").count(mutation.text) == 1


@contextmanager
def planted(mutation: Mutation, root: Path) -> Iterator[None]:
    """The bug is there inside the block, and gone after it."""
    path = root / mutation.file
    text = path.read_text(encoding="utf-8")
    try:
        _write(path, text.replace(mutation.text, mutation.becomes))
        yield
    finally:
        _write(path, text)


def _write(path: Path, text: str) -> None:
    """Write a module and forget its bytecode, which Python tells by whole seconds and the size."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(tests: Sequence[str], root: Path) -> tuple[int, str]:
    """pytest's exit code and the lines that tell why; a run beyond the limit counts as failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]
    environment = {name: value for name, value in os.environ.items() if name != "INGOT_TEST_DATA"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {LIMIT} s"
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    told = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-3:]
    return done.returncode, "; ".join(told[:1])


def verdict_of(mutation: Mutation, root: Path) -> tuple[str, str]:
    """``caught``, ``SURVIVED``, ``does not apply`` or ``does not run``, and a line that tells more."""
    if not applies(mutation, root):
        return "does not apply", f"{mutation.file} has the text not once"
    with planted(mutation, root):
        code, told = run_tests(mutation.tests, root)
    if code == FAILED:
        return "caught", told.removeprefix("FAILED ").removeprefix("ERROR ").split(" - ")[0]
    return ("SURVIVED", ", ".join(mutation.tests)) if code == PASSED else ("does not run", told)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs and see that tests catch them.")
    parser.add_argument("names", nargs="*", help="TOML files without ending, or parts of mutations' names")
    chosen = wanted(read_all(), parser.parse_args().names)
    verdicts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="ingot-mutations-") as folder:
        root = Path(folder).resolve() / "repository"
        copy_repository(root)
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        code, told = run_tests(tests, root)
        if code != PASSED:
            print(f"without a mutation these tests do not pass: {told}")
            return 2
        for mutation in chosen:
            start = time.perf_counter()
            verdict, more = verdict_of(mutation, root)
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
            seconds = time.perf_counter() - start
            print(f"{verdict:14} {seconds:5.1f} s  {mutation.source}: {mutation.name}  [{more}]", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    return 0 if set(verdicts) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())
