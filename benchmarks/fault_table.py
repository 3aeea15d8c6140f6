"""Faults by schemes: what ``ingot verify`` says of the pocket model's engines, sound and broken.

A limit in seconds may end it before the last fault; rows that are there are whole.

    python benchmarks/fault_table.py --device cuda --json docs/results/faults_gpu.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from ingot.device import resolve_device
from ingot.measure.side.machine import machine
from ingot.proof.verify_engine import verify
from tests.e2e.faults import FAULTS, SCHEMES, build_scheme, faulty

Row = dict[str, Any]


def row_of(scheme: str, fault: str | None, engine: Path, device: str) -> Row:
    """One verdict, where it is off, and the largest deviations in parts of their limits."""
    start = time.perf_counter()
    with faulty(fault):
        found = verify(engine, device, note=False)
    return {
        "scheme": scheme,
        "fault": fault,
        "verdict": found.verdict,
        "steps": found.num_steps,
        "most": round(max(found.steps.values(), default=0.0), 3),
        "first": next((failure.message for failure in found.failures), None),
        "seconds": round(time.perf_counter() - start, 1),
    }


def line_of(row: Row) -> str:
    """A row as a line."""
    what = f"{row['scheme']:<16} {row['fault'] or 'sound':<22} {row['verdict']:<8}"
    return f"{what} {row['seconds']:5.1f} s  {row['first'] or row['most']}"


def main() -> None:
    """Build every scheme, verify it sound and with every fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--schemes", default=",".join(SCHEMES).replace("w8a8, int8 cache", "w8a8+kv8"))
    parser.add_argument("--faults", default=",".join(FAULTS), help="none: sound engines only")
    parser.add_argument("--within", type=float, default=1e9, help="seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start, rows = time.perf_counter(), []
    faults = [] if args.faults == "none" else args.faults.split(",")
    with tempfile.TemporaryDirectory() as work:
        for short in args.schemes.split(","):
            scheme = "w8a8, int8 cache" if short == "w8a8+kv8" else short
            engine = build_scheme(scheme, Path(work) / short.replace(" ", "-"), args.device)
            for fault in (None, *faults):
                if time.perf_counter() - start > args.within:
                    break
                rows.append(row_of(scheme, fault, engine, args.device))
                print(line_of(rows[-1]), flush=True)
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(resolve_device(args.device)),
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
