"""Build and load time of a checkpoint, and the host memory that each takes at most.

Each part runs in a process of its own, so that its peak is its own. Speed is ``ingot bench``'s business.

    python recipes/random_checkpoint.py /tmp/ck
    python benchmarks/build.py /tmp/ck --engine /tmp/engine --json docs/results/build_7b.json
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ingot.device import resolve_device
from ingot.measure.side.machine import machine

PARTS = ("build", "load")


def peak_host_gb() -> dict[str, float]:
    """Peak resident memory of this process; ``anonymous`` leaves out mapped files as they are now."""
    status = Path("/proc/self/status").read_text()
    fields = {
        k: v.split()[0] for k, _, v in (line.partition(":") for line in status.splitlines()) if v.split()
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_host_gb": round(peak / 1e6, 2), "anonymous_gb": round(int(fields["RssAnon"]) / 1e6, 2)}


def measure_build(checkpoint: Path, engine: Path, dtype: str) -> dict[str, Any]:
    """Seconds and peak host memory of ``ingot build``, and the sizes of what it read and wrote."""
    from ingot import build

    start = time.perf_counter()
    build(checkpoint, engine, dtype=dtype, force=True)
    seconds = time.perf_counter() - start
    size = sum(f.stat().st_size for f in engine.rglob("*") if f.is_file())
    shard = max(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    return {
        "build_s": round(seconds, 2),
        "engine_gb": round(size / 1e9, 3),
        "largest_shard_gb": round(shard / 1e9, 3),
        **peak_host_gb(),
    }


def measure_load(engine: Path, device: torch.device) -> dict[str, Any]:
    """Seconds and peak host memory until an engine is ready to generate, hashes compared."""
    from ingot import LLM

    start = time.perf_counter()
    LLM(engine, device=str(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {"load_s": round(time.perf_counter() - start, 2), **peak_host_gb()}


def main() -> None:
    """Run both parts and write one JSON, the last line of stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--engine", type=Path, required=True, help="the engine folder to make")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, help="only this one, in this process")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    if arguments.part == "build":
        print(json.dumps(measure_build(arguments.checkpoint, arguments.engine, arguments.dtype)))
        return
    if arguments.part == "load":
        print(json.dumps(measure_load(arguments.engine, device)))
        return
    results: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "machine": machine(device)}
    for part in PARTS:
        words = [sys.executable, *sys.argv, "--part", part]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        results[part] = json.loads(done.stdout.splitlines()[-1])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
