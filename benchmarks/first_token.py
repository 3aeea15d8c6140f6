"""Time to first token on a warm connection, beside a new one.

One client, one request after another, in turns on a connection that was used before and on a new one.
A server that does not send small parts at once answers the former 40 ms later. Ends with 1 if the warm one is
slower by more than the limit. The last line is JSON.

    python benchmarks/first_token.py engines/pocket-chat --json docs/results/first_token.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from neighbours import CHAT  # noqa: E402
from serve import start_server  # noqa: E402

QUESTION = {"role": "user", "content": "How much is 1 + 2?"}


def first_token_ms(connection: http.client.HTTPConnection) -> float:
    """Milliseconds from the request to the first event of its stream, which is read to its end."""
    body = {"model": "m", "messages": [QUESTION], "max_tokens": 2, "stream": True}
    start = time.perf_counter()
    connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    line = reply.readline()
    taken = time.perf_counter() - start
    assert line.startswith(b"data: {"), line
    reply.read()
    return taken * 1000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=20.0, help="ms by which a warm one may be slower")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    server, port = start_server(args.engine, args.threads)
    times: dict[str, list[float]] = {"warm": [], "new": []}
    try:
        warm = http.client.HTTPConnection("127.0.0.1", port)
        for _ in range(5):
            first_token_ms(warm)
        for _ in range(args.rounds):
            times["warm"].append(round(first_token_ms(warm), 2))
            new = http.client.HTTPConnection("127.0.0.1", port)
            times["new"].append(round(first_token_ms(new), 2))
            new.close()
    finally:
        server.terminate()
        server.wait()
    median = {name: round(statistics.median(values), 2) for name, values in times.items()}
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": platform.machine(),
        "rounds": args.rounds,
        "median_ms": median,
        "ms": times,
    }
    print(f"time to first token, median: {median}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if median["warm"] <= median["new"] + args.limit else 1


if __name__ == "__main__":
    raise SystemExit(main())
