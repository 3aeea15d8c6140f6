"""Every figure of engines in fewer bits that docs/benchmarks.md has, one command after another.

Each is a command that can be run alone, with a time limit of its own; what it writes stays when another one
fails. Prints what it runs, the seconds it took and its last lines.

    python benchmarks/fewer_bits.py --json docs/results --within 600
    python benchmarks/fewer_bits.py --json /tmp/figures latency_7b_w8a16 mixed_7b_w4a16

Where no kernel has been compiled before, most of a command's time is the compiler's, on one core.
``--compile 5`` first runs the engines' commands in small, five at a time, and throws their figures away.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SHAPE = ["--random-weights", str(HERE / "shapes" / "llama-7b.json"), "--max-seq-len", "4096"]
DECODED = ("w8a16", "w4a16", "w8a8", "w4a8", "rptq-w8a8")
MIXED = {
    "w8a16": [],
    "w4a16": [],
    "w8a8": [],
    "w8a8_kv8": ["--kv-dtype", "int8"],
    "w8a8_fp8": ["--kv-dtype", "fp8"],
}
SMALL = ["--prompt-tokens", "48", "--new-tokens", "3", "--repeats", "1"]
BESIDE_OTHERS = ["--cache-tokens", "17408", "--threads", "1"]
SCRIPTS = ("quantized_products", "packed_matmul", "int8_products", "int8_cache")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Name of the figures and command; the name of its JSON file follows."""
    ingot = [sys.executable, "-m", "ingot", "bench"]
    for quant in DECODED:
        ways = ["--quant", quant, "--batch", "1,8,32,64", "--repeats", "3"]
        yield f"latency_7b_{quant.replace('-', '_')}", [*ingot, "latency", *SHAPE, *ways]
    for quant in ("w8a8", "w4a16"):
        once = ["--quant", quant, "--batch", "1", "--prompt-tokens", "2048", "--new-tokens", "1"]
        yield f"prefill_7b_{quant}", [*ingot, "latency", *SHAPE, *once]
    for name, more in MIXED.items():
        load = ["--quant", name.split("_")[0], "--mixed", "256", "--repeats", "3", *more]
        yield f"mixed_7b_{name}", [*ingot, "throughput", *SHAPE, *load]
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


def small(command: list[str]) -> list[str]:
    """The same kernels in a few steps, beside others on one GPU; of options given twice the last counts."""
    at_once = ["--fixed" if word == "--mixed" else word for word in command]
    return [*at_once, *SMALL, *BESIDE_OTHERS]


def compile_kernels(asked: list[list[str]], together: int, seconds: float) -> None:
    """Leave the kernels of engines in Triton's cache; what fails here is told where it is measured."""
    engines = [small(command) for command in asked if "bench" in command]
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(together) as pool:
        full = [[*line, "--json-file", f"{folder}/{place}.json"] for place, line in enumerate(engines)]
        ends = list(pool.map(lambda line: run(line, seconds, 1), full))
    done = sum(end.startswith("done") for end in ends)
    print(f"== compiled: {done} of {len(ends)} in {time.perf_counter() - begun:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of figures; all without")
    parser.add_argument("--json", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--limit", type=float, default=120, help="seconds of one command")
    parser.add_argument("--within", type=float, default=3600, help="seconds of all")
    parser.add_argument("--lines", type=int, default=12, help="of a command's output")
    parser.add_argument("--compile", type=int, default=0, help="commands at a time, in small, before all")
    given = parser.parse_args()
    known = dict(commands())
    if unknown := set(given.names) - set(known):
        parser.error(f"no figures of the name {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    given.json.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + given.within
    names = given.names or list(known)
    if given.compile:
        compile_kernels([known[name] for name in names], given.compile, min(given.limit, given.within / 3))
    for name in names:
        left = end - time.perf_counter()
        if left < 1:
            print(f"== {name}: no time left", flush=True)
            continue
        flag = "--json-file" if "bench" in known[name] else "--json"  # of scripts
        command = [*known[name], flag, str(given.json / f"{name}.json")]
        print(f"== {name}: {run(command, min(left, given.limit), given.lines)}", flush=True)


if __name__ == "__main__":
    main()
