"""Faults by schemes: what a build says when it compares what it stored with the checkpoint.

Engines of a small random model, sound and with a fault planted in their stored tensors, hashes right again.

    python benchmarks/source_faults.py --json docs/results/source_faults_cpu.json
    python benchmarks/source_faults.py --false-alarms 100 --json docs/results/source_false_alarms_cpu.json
    python benchmarks/source_faults.py --cost models/pocket-chat --json docs/results/source_cost_cpu.json
    python recipes/random_checkpoint.py /tmp/7b --samples /tmp/7b.jsonl
    python benchmarks/source_faults.py --device cuda --cost /tmp/7b --json docs/results/source_cost_7b.json
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from ingot import build
from ingot.building import builder
from ingot.building.source.source_check import SourceCheck, compare_with_source
from ingot.config.quantization.quant_config import QuantConfig
from ingot.device import resolve_device
from ingot.measure.side.machine import machine
from tests.quant.source_faults import FAULTS, SCHEMES, built, planted, samples_of, write_source

Row = dict[str, Any]
KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2")
DTYPES = ("fp16", "bf16", "fp32")
LARGER = {  # 14 million values in two layers, and a head
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}
COSTS = {
    "dense": QuantConfig(),
    "w8a16": QuantConfig("w8a16"),
    "w4a16": QuantConfig("w4a16"),
    "w8a8": QuantConfig("w8a8"),
    "w4a8": QuantConfig("w4a8"),
    "w4a16 gptq": QuantConfig("w4a16", method="gptq"),
    "w4a16 awq": QuantConfig("w4a16", method="awq"),
    "w8a8 smoothquant": QuantConfig("w8a8", method="smoothquant"),
    "rptq-w8a8": QuantConfig("rptq-w8a8"),
}


def verdict(found: SourceCheck) -> Row:
    """The first tensor that is off, or the largest deviation of all."""
    first = found.differences[0] if found.differences else None
    worst = max(found.differences, key=lambda one: one.share, default=None)
    return {
        "differences": len(found.differences),
        "worst": found.figures.worst,
        "first": None if first is None else first.text,
        "measure": None if worst is None else worst.measure,
        "share": None if worst is None or math.isinf(worst.share) else worst.share,  # all or nothing
    }


def faults(work: Path, device: torch.device) -> Iterator[Row]:
    """Every scheme, sound and with every fault."""
    source = write_source(work / "source", tie_word_embeddings=False)
    for scheme in SCHEMES:
        engine = built(source, work / scheme.replace(" ", "-"), scheme, device=str(device))
        yield {"scheme": scheme, "fault": None, **verdict(compare_with_source(engine, source, device))}
        for fault in FAULTS:
            if planted(engine, work / "planted", fault):
                found = verdict(compare_with_source(work / "planted", source, device))
                yield {"scheme": scheme, "fault": fault, **found}


def sound(work: Path, device: torch.device, builds: int) -> Iterator[Row]:
    """An engine of each seed: another scheme, architecture and dtype each time."""
    names = list(SCHEMES)
    for seed in range(builds):
        scheme, kind = names[seed % len(names)], KINDS[(seed // len(names) + seed) % len(KINDS)]
        if SCHEMES[scheme].rotation and kind in ("gemma2", "gpt2"):
            kind = "llama"  # the others cannot be rotated
        dtype = DTYPES[seed % len(DTYPES)]
        folder = work / str(seed)
        source = write_source(folder / "source", kind, seed=seed)
        with patch.object(builder, "compare_with_source", _kept):
            built(source, folder / "engine", scheme, dtype, device=str(device))
        found = compare_with_source(folder / "engine", source, device)
        yield {"seed": seed, "kind": kind, "scheme": scheme, "dtype": dtype, **verdict(found)}


def _kept(folder: Path, *rest: Any) -> SourceCheck:
    """Nothing is refused while a false alarm is looked for: what is off is counted after the build."""
    found = compare_with_source(folder, *rest)
    return SourceCheck(found.figures, ())


def costs(
    work: Path, device: torch.device, checkpoint: Path | None, proof: bool, schemes: list[str]
) -> Iterator[Row]:
    """Seconds of a build, tuned as by default, and of the comparison in it: of the processor on a CPU, where
    other processes do not count, and by the clock on a GPU.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    source = checkpoint or write_source(work / "source", "llama", **LARGER)
    samples = samples_of(source)
    samples = samples if samples.exists() else Path("recipes/heldout.jsonl")
    build(source, work / "engine", tune=False, device=str(device), proof=False)  # what happens once
    for scheme in schemes:
        quant = COSTS[scheme]
        taken: list[float] = []

        def timed(*arguments: Any, taken: list[float] = taken) -> SourceCheck:
            start = clock()
            found = compare_with_source(*arguments)
            taken.append(clock() - start)
            return found

        calib = {"calib": samples, "calib_samples": 16} if quant.calibrated else {}
        options = {"device": str(device), "quant": quant, "proof": proof, "force": True} | calib
        start = clock()
        with patch.object(builder, "compare_with_source", timed):
            build(source, work / "engine", **options)
        seconds = clock() - start
        share = taken[-1] / seconds
        yield {"scheme": scheme, "seconds": seconds, "comparison_s": taken[-1], "share": share}


def main() -> None:
    """Run one of the three and write its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--false-alarms", type=int, help="sound engines to build instead, one per seed")
    parser.add_argument("--cost", help="a checkpoint, or 'random': measure the time of builds instead")
    parser.add_argument("--schemes", nargs="+", choices=list(COSTS), default=list(COSTS), help="of --cost")
    parser.add_argument("--no-proof", action="store_true", help="with --cost: builds without golden cases")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, rows = resolve_device(args.device), []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if args.cost:
            checkpoint = None if args.cost == "random" else Path(args.cost)
            found = costs(work, device, checkpoint, not args.no_proof, args.schemes)
        else:
            found = sound(work, device, args.false_alarms) if args.false_alarms else faults(work, device)
        for row in found:
            rows.append(row)
            print(row, flush=True)
    report = {"command": shlex.join(["python", *sys.argv]), "machine": machine(device), "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
