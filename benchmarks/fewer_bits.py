"""Every figure of the 7B on a GPU that the tables are made of, one command after another.

Each is a command that can be run alone, with a time limit of its own; what it writes stays when another one
fails. Prints what it runs, the seconds it took and its last lines. Names are beginnings: ``headline`` is
the whole table, ``headline/w8a8`` two lines of it.

    python benchmarks/fewer_bits.py headline --json docs/results --compile 7 --rounds 1 --within 580
    python benchmarks/fewer_bits.py headline --json docs/results --rounds 2 3 --within 580
    python benchmarks/fewer_bits.py quantized_products --json /tmp/figures

A round is a process for each scheme: decode times differ from process to process, too. The first round has
the mixed load as well. Where no kernel has been compiled before, most of a command's time is the compiler's,
on one core. ``--compile 7`` first runs the engines' commands in small, seven at a time, and throws their
figures away.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SCHEMES = ("none", "w8a16", "w4a16", "w8a8", "w4a8", "rptq-w8a8")
ENGINES = "headline"
SCRIPTS = ("quantized_products", "packed_matmul", "int8_products", "int8_cache")


def commands(rounds: Sequence[int], more: Sequence[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """Name of the figures and command; the name of its JSON file follows. ``more`` is for every engine's."""
    engine = [sys.executable, str(HERE / f"{ENGINES}.py")]
    for place in rounds:
        parts = [] if place == 1 else ["--parts", "latency", "prefill"]
        for scheme in SCHEMES:
            yield f"{ENGINES}/{scheme}.{place}", [*engine, scheme, *parts, *more]
        if place == 1:
            cache = ["--kv-dtype", "int8", "--parts", "mixed"]
            yield f"{ENGINES}/w8a8_int8.{place}", [*engine, "w8a8", *cache, *more]
    for script in SCRIPTS:
        sweep = ["--sweep"] if script == "int8_cache" else []
        yield script, [sys.executable, str(HERE / f"{script}.py"), *sweep]


def run(command: list[str], seconds: float, shown: int) -> str:
    """What became of a command, and its last lines."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
        ended, output = "done" if done.returncode == 0 else f"failed ({done.returncode})", done.stdout
    except subprocess.TimeoutExpired as stopped:
        caught = stopped.output or b""
        ended, output = "stopped", caught if isinstance(caught, str) else caught.decode()
    tail = "\n".join(output.rstrip().splitlines()[-shown:])
    return f"{ended} after {time.perf_counter() - start:.0f} s\n{tail}"


def compile_kernels(asked: dict[str, list[str]], together: int, seconds: float) -> None:
    """Leave the kernels of engines in Triton's cache; what fails here is reported where it is measured."""
    engines = [command for name, command in asked.items() if name.startswith(ENGINES)]
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(together) as pool:
        full = [
            [*line, "--small", "--repeats", "1", "--threads", "1", "--json", f"{folder}/{place}.json"]
            for place, line in enumerate(engines)
        ]
        ends = list(pool.map(lambda line: run(line, seconds, 1), full))
    done = sum(end.startswith("done") for end in ends)
    print(f"== compiled: {done} of {len(ends)} in {time.perf_counter() - begun:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="beginnings of figures' names; all without")
    parser.add_argument("--json", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 3], help="of the headline table")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one command")
    parser.add_argument("--within", type=float, default=3600, help="seconds of all")
    parser.add_argument("--lines", type=int, default=12, help="of a command's output")
    parser.add_argument("--compile", type=int, default=0, help="commands at a time, in small, before all")
    parser.add_argument("--engine", nargs=argparse.REMAINDER, default=[], help=f"options for {ENGINES}.py")
    given = parser.parse_args()
    known = dict(commands(given.rounds, given.engine))
    wanted = {name: line for name, line in known.items() if name.startswith(tuple(given.names) or "")}
    if not wanted:
        parser.error(f"no figures of that name; there are {', '.join(known)}")
    end = time.perf_counter() + given.within
    if given.compile:
        compile_kernels(wanted, given.compile, min(given.limit, given.within / 3))
    failed = False
    for name, line in wanted.items():
        left = end - time.perf_counter()
        file = given.json / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        outcome = "no time left"
        if left >= 1:
            outcome = run([*line, "--json", str(file)], min(left, given.limit), given.lines)
        failed |= not outcome.startswith("done")
        print(f"== {name}: {outcome}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
