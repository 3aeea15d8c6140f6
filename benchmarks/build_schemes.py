"""What a build of each scheme costs: seconds, memory of GPU and host, and the engine's bytes.

Every build runs in a process of its own, so that its peaks are its own, and its engine is deleted after it.
Methods that calibrate take samples of random token ids: what they cost depends on their number and length
alone. Tuning and proof, which cost about the same for every scheme, are left out unless they are asked for. A
scheme that meets its time limit is a row that says so; the JSON is written after every scheme.

    python benchmarks/build_schemes.py /tmp/ck --work /tmp/schemes --json docs/results/build_schemes_7b.json
    python benchmarks/build_schemes.py /tmp/tiny --shape tiny --work /tmp/schemes --samples 4 --device cpu
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from build import peak_host_gb

sys.path.insert(0, str(Path(__file__).parents[1]))
from ingot.config.quantization.quant_config import QuantConfig
from ingot.device import resolve_device
from ingot.measure.side.machine import machine
from recipes import random_checkpoint
from recipes.random_checkpoint import SHAPES, write_samples

# The cheapest first.
SCHEMES = {
    "fp16": QuantConfig(),
    "w8a16": QuantConfig("w8a16"),
    "w4a16": QuantConfig("w4a16"),
    "w4a8": QuantConfig("w4a8"),
    "w8a8-smoothquant": QuantConfig("w8a8", method="smoothquant"),
    "w4a16-awq": QuantConfig("w4a16", method="awq"),
    "w4a16-gptq": QuantConfig("w4a16", method="gptq"),
    "rptq-w8a8": QuantConfig("rptq-w8a8"),
}
LONGEST = 512  # tokens of a sample
Row = dict[str, Any]


class AnonymousPeak:
    """The most memory of this process that no file backs, in bytes, looked at every 20 ms."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            lines = Path("/proc/self/status").read_text().splitlines()
            self.bytes = max(self.bytes, *(int(one.split()[1]) << 10 for one in lines if "RssAnon" in one))


def measure(scheme: str, given: argparse.Namespace) -> Row:
    """One build, in this process."""
    from ingot import build

    device, quant = resolve_device(given.device), SCHEMES[scheme]
    calib: Row = {}
    if quant.calibrated:
        calib = {"calib": given.work / "samples.jsonl", "calib_samples": given.samples}
    engine = given.work / scheme / "engine"
    if device.type == "cuda":
        torch.cuda.init()  # outside of what is timed
    start = time.perf_counter()
    with AnonymousPeak() as anonymous:
        limits: Row = {"max_batch_size": 64, "max_seq_len": 2048, "tune": given.tune, "proof": given.proof}
        build(given.checkpoint, engine, dtype="fp16", device=str(device), quant=quant, **calib, **limits)
    seconds = time.perf_counter() - start
    row: Row = {"seconds": round(seconds, 2)}
    if device.type == "cuda":
        row["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 3)
        row["peak_gpu_reserved_gb"] = round(torch.cuda.max_memory_reserved(device) / 1e9, 3)
    row["peak_host_gb"] = peak_host_gb()["peak_host_gb"]
    row["peak_host_anonymous_gb"] = round(anonymous.bytes / 1e9, 2)
    size = sum(file.stat().st_size for file in engine.rglob("*") if file.is_file())
    return row | {"engine_bytes": size}


def measured(scheme: str, limit: float) -> Row:
    """One build, in a process that may take ``limit`` seconds; nothing of it stays on the disk."""
    words = [sys.executable, *sys.argv, "--only", scheme]
    if limit <= 0:
        return {"error": "no time was left"}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip() or f"exit code {done.returncode}")[-600:]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: list[Row]) -> str:
    """All schemes as a table in Markdown."""
    names = ("seconds", "peak_gpu_gb", "peak_host_gb", "peak_host_anonymous_gb", "engine_bytes")
    heads = ("s", "GPU, GB", "host, GB", "of it no file's, GB", "engine, bytes")
    lines = ["| scheme | " + " | ".join(heads) + " |", "|" + "---|" * (len(names) + 1)]
    for row in rows:
        cells = [row.get(name, "") for name in names]
        if "error" in row:
            cells[0] = row["error"].splitlines()[-1].replace("|", "/")
        lines.append("| " + " | ".join(str(cell) for cell in (row["scheme"], *cells)) + " |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="made of random weights where there is none")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b", help="of the checkpoint")
    parser.add_argument("--work", type=Path, required=True, help="a folder for engines and samples")
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--samples", type=int, default=128, help=f"of {LONGEST} tokens, to calibrate with")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one scheme may take")
    parser.add_argument("--within", type=float, default=300.0, help="seconds that all may take together")
    parser.add_argument("--tune", action="store_true", help="tune kernels in every build")
    parser.add_argument("--proof", action="store_true", help="make the proof in every build")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--only", choices=list(SCHEMES), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.only:
        print(json.dumps(measure(given.only, given)))
        return
    begun = time.monotonic()
    results: Row = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(resolve_device(given.device)),
    }
    given.work.mkdir(parents=True, exist_ok=True)
    if not (given.checkpoint / "config.json").exists():
        words = [sys.executable, random_checkpoint.__file__, str(given.checkpoint), "--shape", given.shape]
        subprocess.run(words, check=True)  # a process of its own: builds inherit this one's peak
        results["checkpoint_s"] = round(time.monotonic() - begun, 1)
    samples = {"samples": given.samples, "length": LONGEST}
    write_samples(given.work / "samples.jsonl", SHAPES[given.shape]["vocab_size"], **samples)
    results |= {"samples": samples, "tune": given.tune, "proof": given.proof, "schemes": []}
    for scheme in given.schemes:
        left = given.within - (time.monotonic() - begun)
        row = {"scheme": scheme} | measured(scheme, min(given.limit, left))
        shutil.rmtree(given.work / scheme, ignore_errors=True)
        print(row, file=sys.stderr, flush=True)
        results["schemes"].append(row)
        if given.json:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results["schemes"]))


if __name__ == "__main__":
    main()
