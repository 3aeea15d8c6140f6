"""The memory ledger against a GPU: bytes by kind, predicted and measured, at two settings.

Each setting runs in a process of its own: it loads a model of random weights, captures every graph, and runs
a full batch of longest requests. The GPU should be idle. The last line of each setting is JSON, and the exit
code is 1 where what the GPU holds in the end differs from the prediction by more than 5 %.

    python benchmarks/memory.py benchmarks/shapes/llama-7b.json --json docs/results/memory.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ingot import LLM
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams
from ingot.device import resolve_device
from ingot.engine.engine_loader import setting_of
from ingot.measure.side.machine import machine
from ingot.memory.ledger import Capacity, Ledger, ledger
from ingot.runtime.setup import measured_activations

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"max_batch_size": 64, "max_seq_len": 4096},
    "small cache": {"max_batch_size": 8, "max_seq_len": 2048, "cache_tokens": 16384},
}
NEW_TOKENS = 32
TOLERANCE = 0.05


def outside_allocator(device: torch.device) -> int:
    """Bytes of the GPU that are in use but not PyTorch's allocator's: context, driver, other processes."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def in_use(device: torch.device) -> int:
    """Bytes of the GPU that are in use, by anyone."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def measure(config: Path, name: str) -> dict[str, Any]:
    """Both sides of one setting, by kind."""
    values = dict(SETTINGS[name])
    runtime = RuntimeConfig(cache_tokens=values.pop("cache_tokens", None))
    device = resolve_device("cuda")
    torch.ones(64, 64, device=device, dtype=torch.float16) @ torch.ones(64, 64, device=device).half()
    context = outside_allocator(device)
    llm = LLM.from_config(config, str(device), runtime=runtime, **values)
    engine, executor = llm.engine, llm.executor
    setting = setting_of(engine.manifest, engine.dtype, device).replace(runtime=runtime)
    found = ledger(setting, Capacity(torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]))
    activations = measured_activations(engine.model, device, engine.dtype, setting.max_batch_size, runtime)
    torch.cuda.empty_cache()
    before = {"reserved": torch.cuda.memory_reserved(device), "outside": outside_allocator(device)}
    llm.warm_up()
    after = {"reserved": torch.cuda.memory_reserved(device), "outside": outside_allocator(device)}
    run_full_batch(llm, setting.max_batch_size, setting.max_seq_len)
    storages = [t.untyped_storage() for t in (*engine.model.parameters(), *engine.model.buffers())]
    measured = {
        "weights": sum({s.data_ptr(): s.nbytes() for s in storages}.values()),
        "KV cache": sum(c.keys.nbytes + c.values.nbytes for c in executor.runner.caches),
        "activations": activations,
        "warm_up": sum(after.values()) - sum(before.values()),
        "process": context,
        "total": in_use(device),
    }
    allocator = {
        "peak_allocated": torch.cuda.max_memory_allocated(device),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
        "warm_up_allocator": after["reserved"] - before["reserved"],
        "warm_up_driver": after["outside"] - before["outside"],
    }
    return compared(name, found, measured) | {"allocator": allocator, "preemptions": executor.num_preemptions}


def run_full_batch(llm: LLM, batch: int, max_seq_len: int) -> None:
    """As many of the longest requests as a step takes, together."""
    prompts = [[i + 1] * (max_seq_len - NEW_TOKENS) for i in range(batch)]
    llm.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=1))


def compared(name: str, found: Ledger, measured: dict[str, int]) -> dict[str, Any]:
    """Predicted and measured bytes of every kind, and their ratio."""
    claims = sum(item.bytes for item in found.items if item.kind == "reserve" and item.name != "unclaimed")
    predicted = {
        "weights": found.of("weights"),
        "KV cache": found.blocks * found.setting.block_bytes,
        "activations": found.of("activations"),
        "warm_up": claims,
        "process": found.of("process"),
        "total": found.used,
    }
    kinds = {
        kind: {
            "predicted": predicted[kind],
            "measured": measured[kind],
            "ratio": round(predicted[kind] / max(measured[kind], 1), 4),
        }
        for kind in predicted
    }
    return {"setting": name, "capacity": found.capacity and found.capacity.to_json(), "kinds": kinds}


def in_own_process(config: Path, name: str) -> dict[str, Any]:
    """``measure`` of a fresh process."""
    command = [sys.executable, __file__, str(config), "--only", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--only", choices=SETTINGS, help="one setting, in this process")
    parser.add_argument("--json", type=Path, help="write machine, command and figures here")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.config, arguments.only)))
        return 0
    results = []
    for name in SETTINGS:
        results.append(in_own_process(arguments.config, name))
        for kind, row in results[-1]["kinds"].items():
            figures = f"predicted {row['predicted'] / 1e9:9.3f} GB  measured {row['measured'] / 1e9:9.3f} GB"
            print(f"{name:12} {kind:12} {figures}  ratio {row['ratio']:.3f}")
        print(json.dumps(results[-1]))
    if arguments.json:
        record = {
            "machine": machine(resolve_device("cuda")),
            "command": shlex.join(["python", *sys.argv]),
            "settings": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    off = [r["setting"] for r in results if abs(r["kinds"]["total"]["ratio"] - 1) > TOLERANCE]
    if off:
        print(f"more than {TOLERANCE:.0%} off: {off}", file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
