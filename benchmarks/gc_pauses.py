"""How long Python's garbage collections stop a server and its engine while clients ask.

So many clients ask one after another, for seconds. Both processes note every collection. The JSON, also on
the last line, has those of the longest generation and the longest one, by process, from when the server was
ready.

    python benchmarks/gc_pauses.py engines/pocket-chat --seconds 60 --json docs/results/gc_pauses.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import torch  # noqa: E402
from serve import start_server  # noqa: E402

from ingot.measure.side.machine import machine  # noqa: E402

NOTES = """
import gc, os, sys, time

name = "engine" if "engine_process" in " ".join(sys.orig_argv) else "server"
file, began = open(f"{folder}/{{name}}.{{os.getpid()}}", "w", buffering=1), [0.0]

def note(phase, info):
    now = time.time()
    if phase == "start":
        began[0] = now
    else:
        print(began[0], now - began[0], info["generation"], file=file)

gc.callbacks.append(note)
"""


def ask(port: int, client: int, until: float) -> int:
    """One answer after another; returns how many."""
    count = 0
    while time.time() < until:
        body = {"model": "m", "prompt": f"Story {client} {count}: a fire", "max_tokens": 12, "stream": True}
        connection = HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read()
        connection.close()
        count += 1
    return count


def noted(folder: Path, since: float) -> dict[str, Any]:
    """Collections of each process that served, from ``since`` on, in ms."""
    found: dict[str, Any] = {}
    for path in folder.glob("*.[0-9]*"):
        rows = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
        rows = [row for row in rows if row[0] >= since]
        if rows:
            full = sorted(round(1e3 * seconds, 1) for _, seconds, generation in rows if generation == 2)
            longest = round(1e3 * max(seconds for _, seconds, _ in rows), 1)
            found[path.stem] = {"collections": len(rows), "full_ms": full, "longest_ms": longest}
    return found


def main() -> None:
    """Measure and print one JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", help="an engine of a batch of at least --clients")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--label", default="as is", help="name of this run in the record")
    parser.add_argument("--json", type=Path, help="results are added to this file, by label")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(NOTES.format(folder=folder))
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(Path(__file__).resolve().parents[1])])
        server, port = start_server(args.engine, None)
        since = time.time()
        with ThreadPoolExecutor(args.clients) as pool:
            asked = [pool.submit(ask, port, n, since + args.seconds) for n in range(args.clients)]
        server.terminate()
        server.wait()
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(torch.device("cpu")),
            "answers": sum(one.result() for one in asked),
            **noted(Path(folder), since),
        }
    if args.json:
        records = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps(records | {args.label: record}, indent=1) + "\n")
    print(json.dumps({args.label: record}))


if __name__ == "__main__":
    main()
