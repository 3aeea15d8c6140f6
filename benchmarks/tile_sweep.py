"""The command line that sweeps of tiles share: cases of bits x rows, compiled by all cores, then timed.

run_cases(arguments(__doc__, "8x8,8x1").parse_args(), compile_share, Sweep)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import triton


class CaseSweep(Protocol):
    """One case's sweep."""

    def run(self) -> dict[str, Any]:
        """Its figures."""
        ...


def arguments(doc: str | None, cases: str) -> argparse.ArgumentParser:
    """What every sweep takes; ``cases``: the default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=cases, help="bits x rows, comma-separated")
    parser.add_argument("--json", type=Path, help="file to write, after every case")
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds after which nothing new begins")
    parser.add_argument("--dry", action="store_true", help="tiny, interpreted, on a CPU: no figures")
    return parser


def runs(call: Callable[[], Any]) -> bool:
    """Whether a kernel fits; it has run then."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception:
        return False  # more shared memory or registers than there are
    return True


def run_cases(
    given: argparse.Namespace,
    compile_share: Callable[[int, int, int, int], None],
    sweep: Callable[[int, int, bool, float], CaseSweep],
) -> None:
    """Every case in turn.

    Args:
        given: of ``arguments``.
        compile_share: of rank, ranks, bits and rows: runs one in ``ranks`` of a case's kernels once, in a
            process of its own.
        sweep: of bits, rows, whether it is dry, and when to stop, by ``time.monotonic``.
    """
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": "none" if given.dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cases": [],
    }
    end, ranks = time.monotonic() + given.limit_s, max((os.cpu_count() or 2) - 1, 1)
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:  # none starts in a dry run
        for case in given.cases.split(","):
            bits, rows = (int(n) for n in case.split("x"))
            begun = time.monotonic()
            if begun > end:
                break
            if not given.dry:
                list(pool.map(compile_share, range(ranks), [ranks] * ranks, [bits] * ranks, [rows] * ranks))
                print(f"{case}: compiled in {time.monotonic() - begun:.0f} s", flush=True)
            results["cases"].append(sweep(bits, rows, given.dry, end).run())
            if given.json:
                given.json.write_text(json.dumps(results) + "\n", encoding="utf-8")
