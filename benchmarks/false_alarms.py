"""Many small engines of random weights, each of another seed, shape and scheme: all must be proven.

python benchmarks/false_alarms.py --builds 100 --device cpu --json docs/results/false_alarms_cpu.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from ingot import build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.device import resolve_device
from ingot.measure.side.machine import machine
from ingot.proof.verify_engine import verify
from recipes.random_checkpoint import write_samples
from tests.tiny_models import save_model, tiny_config

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
SCHEMES: dict[str, dict[str, Any]] = {
    "w8a8": {"quant": QuantConfig("w8a8")},
    "w8a8 static": {"quant": QuantConfig("w8a8", activations="static")},
    "w8a8, int8 cache": {"quant": QuantConfig("w8a8"), "kv_dtype": "int8"},
    "w4a8": {"quant": QuantConfig("w4a8")},
    "rptq-w8a8": {"quant": QuantConfig("rptq-w8a8", 32)},
    "rptq-w4a4": {"quant": QuantConfig("rptq-w4a4", 32)},
    "dense": {},
    "w8a16": {"quant": QuantConfig("w8a16")},
    "w4a16": {"quant": QuantConfig("w4a16")},
    "dense, fp8 cache": {"kv_dtype": "fp8"},
}


def one(job: tuple[int, str]) -> dict[str, Any]:
    """Build and verify the engine of a seed."""
    seed, device = job
    torch.set_num_threads(1)
    names = list(SCHEMES)
    scheme, kind = names[seed % len(names)], KINDS[seed // len(names) % len(KINDS)]
    if kind == "gpt2" and scheme == "w4a8":
        kind = "llama"  # a LayerNorm cannot be rotated
    dtype = ("fp16", "bf16")[seed // 2 % 2]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        config = tiny_config(kind)
        save_model(config, folder / "checkpoint", seed=seed)
        samples = {}
        if "static" in scheme or "rptq" in scheme:
            write_samples(folder / "samples.jsonl", config.vocab_size, 8, 64)
            samples = {"calib": folder / "samples.jsonl"}
        engine = build(
            folder / "checkpoint",
            folder / "e",
            device=device,
            dtype=dtype,
            tune=False,
            **SCHEMES[scheme],
            **samples,
        )
        found = verify(engine, device, note=False)
    return {
        "seed": seed,
        "kind": kind,
        "scheme": scheme,
        "dtype": dtype,
        "verdict": found.verdict,
        "worst": found.steps,
        "failures": [failure.message for failure in found.failures],
        "seconds": found.seconds,
    }


def main() -> None:
    """Build, verify, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--builds", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        rows = pool.map(one, [(seed, args.device) for seed in range(args.builds)], chunksize=1)
    alarms = [row for row in rows if row["verdict"] != "proven"]
    worst: dict[str, float] = defaultdict(float)
    for row in rows:
        for place, value in row["worst"].items():
            worst[place] = max(worst[place], value)
    for row in alarms:
        print(row["seed"], row["kind"], row["scheme"], row["dtype"], row["failures"][:2])
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(resolve_device(args.device)),
        "builds": len(rows),
        "false_alarms": len(alarms),
        "worst": dict(worst),
        "seconds": time.perf_counter() - start,
        "rows": [
            {k: v for k, v in row.items() if k != "worst"} | {"most": max(row["worst"].values(), default=0)}
            for row in rows
        ],
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print({key: report[key] for key in ("builds", "false_alarms", "worst", "seconds")})


if __name__ == "__main__":
    main()
