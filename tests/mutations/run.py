"""Plants one bug after another into a copy of the repository and runs the tests that should catch it.

Owns the copy and the verdicts. The bugs are data, in the TOML files beside this one:

    [[mutation]]
    name = "margin always true"
    file = "ingot/proof/golden_replay.py"
    text = "if margin <= 2 * FACTOR * floor.logprobs:"      # once in the file
    becomes = "if True:"
    tests = ["tests/e2e/test_replay.py"]                    # files or test ids

    python -m tests.mutations.run                 # all
    python -m tests.mutations.run runtime quant   # files by name, or mutations by a part of their name

A bug is caught where a test of ``make test`` fails. Tests run without INGOT_TEST_DATA: what matters is tested
with what ships.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PASSED, FAILED = 0, 1  # pytest's exit codes
LIMIT = 300  # seconds of one run; a loop without end is caught, too
LIBRARIES = (  # what tests import, and what takes most of a quick one's time
    *("numpy", "safetensors.torch", "tokenizers", "torch", "transformers", "triton", "typer.testing"),
    *(
        f"transformers.models.{kind}.modeling_{kind}"
        for kind in ("gpt2", "llama", "mistral", "opt", "qwen2", "qwen3")
    ),
)


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


def run_tests(tests: Sequence[str], root: Path, limit: float = LIMIT) -> tuple[int, str]:
    """pytest's exit code and a line that tells why; a run beyond the limit counts as failed.

    In a fork of this process, which has the large libraries and nothing of the repository.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = os.fork()
        if child == 0:
            _be_pytest(tests, root, output.fileno())
        deadline, done, status = time.monotonic() + limit, 0, 0
        while not done:
            time.sleep(0.02)
            done, status = os.waitpid(child, os.WNOHANG)
            if not done and time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return FAILED, f"no end within {limit:.0f} s"
        output.seek(0)
        lines = output.read().splitlines()
    reported = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-3:]
    return os.waitstatus_to_exitcode(status), "; ".join(reported[:1])


def _be_pytest(tests: Sequence[str], root: Path, output: int) -> NoReturn:
    """Run the tests of the repository at ``root`` in this process, and end it."""
    code = -1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        for name in [name for name in sys.modules if name.split(".")[0] in ("ingot", "tests")]:
            del sys.modules[name]
        sys.path[:] = [str(root), *(each for each in sys.path if Path(each).resolve() != ROOT)]
        quick = ("-m", "not gpu and not slow")
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", *quick, *tests]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def verdict_of(mutation: Mutation, root: Path) -> tuple[str, str]:
    """``caught``, ``SURVIVED``, ``does not apply`` or ``does not run``, and a line that tells more."""
    if not applies(mutation, root):
        return "does not apply", f"{mutation.file} has the text not once"
    with planted(mutation, root):
        code, reported = run_tests(mutation.tests, root)
    if code == FAILED:
        return "caught", reported.removeprefix("FAILED ").removeprefix("ERROR ").split(" - ")[0]
    return ("SURVIVED", ", ".join(mutation.tests)) if code == PASSED else ("does not run", reported)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs and see that tests catch them.")
    parser.add_argument("names", nargs="*", help="TOML files without ending, or parts of mutations' names")
    chosen = wanted(read_all(), parser.parse_args().names)
    os.environ.pop("INGOT_TEST_DATA", None)
    # As where there is no GPU: kernels are interpreted, which Triton has to know when it is imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    for library in LIBRARIES:
        importlib.import_module(library)
    verdicts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="ingot-mutations-") as folder:
        root = Path(folder).resolve() / "repository"
        os.environ["PYTHONPATH"] = str(root)  # of processes that tests start
        copy_repository(root)
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        code, reported = run_tests(tests, root, limit=len(chosen) * LIMIT)
        if code != PASSED:
            print(f"without a mutation these tests do not pass: {reported}")
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
