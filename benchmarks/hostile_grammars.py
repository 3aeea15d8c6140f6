"""What 20 hostile grammars cost the engine: its memory after each.

Distinct regexes, each asked for once: ones whose compiled form is as large as a trial allows (`a*` 5,200
times), and ones that are too large (18,000 times). Ends with 1 if the engine dies or grows by more than the
limit. The last line is JSON.

    python benchmarks/hostile_grammars.py engines/pocket-chat
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from neighbours import COMPLETIONS  # noqa: E402
from serve import start_server  # noqa: E402
from soak import children, rss_mib  # noqa: E402

COUNT = 20


def engine_of(pid: int) -> int:
    """The engine's process."""
    for child in children(pid):
        if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise RuntimeError("no engine")


def ask(port: int, pattern: str) -> tuple[int, str]:
    """The status of a request with this grammar, and what its error says."""
    body = {"model": "m", "prompt": "x", "max_tokens": 1, "guided_regex": pattern}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    value = json.loads(reply.read())
    connection.close()
    return reply.status, value.get("error", {}).get("message", "")[:120]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="MiB by which the engine may grow")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    server, port = start_server(args.engine, args.threads)
    rows: list[dict[str, Any]] = []
    try:
        pid = engine_of(server.pid)
        before = rss_mib(pid)
        for number in range(COUNT):
            repeats = 18_000 if number % 4 == 3 else 5_200
            status, error = ask(port, "a*" * repeats + "b" * (number + 1))
            rows.append({"kib": 2 * repeats >> 10, "status": status, "error": error, "rss_mib": rss_mib(pid)})
            print(rows[-1], flush=True)
        alive = ask(port, "[0-9]+")[0] == 200 and engine_of(server.pid) == pid
    finally:
        server.terminate()
        server.wait()
    grown = round(max(row["rss_mib"] for row in rows) - before, 1)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": platform.machine(),
        "grammars": COUNT,
        "served": sum(row["status"] == 200 for row in rows),
        "before_mib": round(before, 1),
        "grown_mib": grown,
        "alive": alive,
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if alive and grown <= args.limit else 1


if __name__ == "__main__":
    raise SystemExit(main())
