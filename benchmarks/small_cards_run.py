"""One request of 1,024 tokens of the 7B and the 14B shape, with memory capped at 8, 12, 16 and 24 GiB.

Weights are random, and packed without a cap, as a build would be elsewhere. Then the allocator gets no more
than the card has beside the CUDA context, the engine plans with 0.9 of the card, and the weights are loaded.
A run answers the request to its end, or is refused before it starts. The exit code is 1 where that is not
what the ledger says of the card, or where an embedding on the host gives other tokens. The last line is JSON.

    python benchmarks/small_cards_run.py --json docs/results/small_cards_run.json     # a GPU of 40 GB or more
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.memory import in_use, outside_allocator
from benchmarks.small_cards import CARDS_GIB, SETTINGS, SHAPES, TOKENS, setting_of
from ingot import LLM
from ingot.building.random_weights import config_manifest, random_tensors
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_file import read_quant
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams
from ingot.device import parse_dtype, resolve_device
from ingot.engine import engine_loader
from ingot.engine.assembly import model_of
from ingot.engine.engine_loader import Engine, fill
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest
from ingot.errors import OutOfMemoryError
from ingot.measure.side.machine import machine
from ingot.memory.ledger import Capacity, ledger
from ingot.memory.memory_error import explained

Weights = Mapping[str, torch.Tensor]
NEW_TOKENS = 64
SHARE = 0.9  # of a card's memory, as RuntimeConfig has it
HOST, HEAD_HOST = "w4a16, embedding on the host", "w4a16, head in 8 bits, embedding on the host"
# What is shown on each card: what fits because of an option, and beside it what does not without.
RUNS: dict[int, tuple[tuple[str, str], ...]] = {
    8: (("7B", HOST), ("7B", HEAD_HOST), ("7B", "w4a16")),
    12: (("7B", "w4a16"), ("14B", HOST), ("14B", "w4a16")),
    16: (("7B", "w8a16"), ("14B", "w4a16")),
    24: (("7B", "16 bits"), ("14B", "w8a16")),
}
assert tuple(RUNS) == CARDS_GIB
WARM = ("7B", HOST, 8)  # with every graph that an engine may have; the others capture what the request needs


def capped_runtime(values: dict[str, Any], gib: int, total: int) -> RuntimeConfig:
    """A runtime that takes of a GPU with ``total`` bytes what it would take of the card."""
    return RuntimeConfig(**values | {"memory_fraction": SHARE * (gib << 30) / total}, prefix_reuse=False)


def cap(gib: int, device: torch.device) -> int:
    """Let the allocator have what a card of so many GiB has beside the context; returns these bytes."""
    torch.ones(64, 64, device=device, dtype=torch.float16) @ torch.ones(64, 64, device=device).half()
    total = torch.cuda.mem_get_info(device)[1]
    room = (gib << 30) - outside_allocator(device)
    torch.cuda.set_per_process_memory_fraction(room / total, device)
    return room


def request(llm: LLM, new_tokens: int) -> tuple[list[int], float]:
    """The tokens of one request that ends at the limit, and its seconds."""
    manifest = llm.engine.manifest
    ids = (7 * i % manifest.model.vocab_size for i in range(manifest.build.max_seq_len - NEW_TOKENS))
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, temperature=0.0)
    start = time.perf_counter()
    (answer,) = llm.generate([list(ids)], params)
    return answer.token_ids, time.perf_counter() - start


def answered(llm: LLM) -> dict[str, Any]:
    """Speed and tokens of the request, once everything is compiled and captured."""
    request(llm, NEW_TOKENS)
    first, prompt_s = request(llm, 1)
    ids, all_s = request(llm, NEW_TOKENS)
    assert ids[0] == first[0]
    assert len(ids) == NEW_TOKENS
    return {
        "new_tokens": len(ids),
        "prompt_ms": round(1e3 * prompt_s, 1),
        "tokens_per_s": round((len(ids) - 1) / (all_s - prompt_s), 1),
        "sha256_of_ids": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
    }


def manifest_of(shape: str, name: str) -> Manifest:
    """One request of a shape, with the schemes of a setting."""
    scheme, head, _ = SETTINGS[name]
    quant = read_quant(scheme).replace(head=head)
    return config_manifest(Path(SHAPES[shape]), "auto", 1, TOKENS, quant)


def packed_weights(manifest: Manifest, device: torch.device) -> Weights:
    """Random weights as an engine stores them, packed on the device, in the host's memory."""
    dtypes = manifest.build.dtypes
    found = {name: t.cpu() for name, t in random_tensors(model_of(manifest), device, dtypes, seed=0)}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def loaded(manifest: Manifest, weights: Weights, device: torch.device, runtime: RuntimeConfig) -> Engine:
    """An engine of these weights, loaded as that of a folder."""
    model, dtypes = model_of(manifest), engine_loader.compute_dtypes(manifest, device)
    setting = engine_loader.setting_of(manifest, dtypes, device, runtime)
    with explained(engine_loader.NO_ROOM, setting, device, own=0):
        fill(model, weights.items(), device, dtypes, runtime)
    dtype = parse_dtype(dtypes.decoder)
    return Engine(manifest, model, TextParts(None, None, ()), KernelPlan(), device, dtype)


def run(shape: str, name: str, gib: int, weights: Weights, device: torch.device) -> dict[str, Any]:
    """One request in a setting of ``SETTINGS`` on the capped device."""
    plan = ledger(setting_of(shape, name), Capacity(f"{gib} GiB", gib << 30))
    record: dict[str, Any] = {"shape": shape, "setting": name, "gib": gib, "planned": plan.fits}
    record |= {"planned_bytes": plan.needed, "planned_in_use": plan.used}
    record["planned_gb"] = round(plan.used / 1e9, 2)
    on_gpu = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if on_gpu else gib << 30
    runtime = capped_runtime(SETTINGS[name][2], gib, total)
    if on_gpu:
        record["allocator_limit"] = cap(gib, device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    try:
        with LLM.of_engine(loaded(manifest_of(shape, name), weights, device, runtime), runtime) as llm:
            record["load_s"] = round(time.perf_counter() - start, 1)
            record["all_graphs"] = (shape, name, gib) == WARM
            if record["all_graphs"]:
                llm.warm_up()
            record |= {"answered": True} | answered(llm)
            record |= held(gib, device) if on_gpu else {}
    except OutOfMemoryError as error:
        record |= {"answered": False, "refused": error.what, "seen": str(error.seen), "fix": error.fix}
    if on_gpu:
        record["peak_allocated"] = torch.cuda.max_memory_allocated(device)
    return record | {
        "as_planned": record["answered"] == plan.fits,
        "s": round(time.perf_counter() - start, 1),
    }


def held(gib: int, device: torch.device) -> dict[str, Any]:
    """Bytes that the process held at most, and whether a card of so many GiB has them."""
    most = torch.cuda.max_memory_reserved(device) + outside_allocator(device)
    return {
        "peak_reserved": torch.cuda.max_memory_reserved(device),
        "outside_allocator": outside_allocator(device),
        "in_use_at_end": in_use(device),
        "held_at_most": most,
        "held_gb": round(most / 1e9, 2),
        "within_card": most <= gib << 30,
    }


def all_runs(device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    """The runs of every card; none starts after so many seconds. Settings of one scheme share weights."""
    start = time.perf_counter()
    planned = [(shape, name, gib) for gib, runs in RUNS.items() for shape, name in runs]
    kinds = [(shape, *SETTINGS[name][:2]) for shape, name, _ in planned]
    packed: dict[tuple[str, str, str], Weights] = {}
    for place, ((shape, name, gib), kind) in enumerate(zip(planned, kinds, strict=True)):
        if time.perf_counter() - start > seconds:
            yield {"shape": shape, "setting": name, "gib": gib, "not_run": "no time left"}
            continue
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        if kind not in packed:
            packed[kind] = packed_weights(manifest_of(shape, name), device)
        weights = packed[kind] if kind in kinds[place + 1 :] else packed.pop(kind)
        yield run(shape, name, gib, weights, device)
        del weights
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def faults(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it should be, one line each."""
    found = []
    ids: dict[tuple[str, str], dict[str, str]] = {}
    for one in runs:
        title = f"{one['shape']}, {one['setting']}, {one['gib']} GiB"
        if "not_run" in one:
            found.append(f"{title}: {one['not_run']}")
            continue
        if not one["as_planned"]:
            found.append(f"{title}: answered {one['answered']}, planned {one['planned']}")
        if not one.get("within_card", True):
            found.append(f"{title}: held {one['held_at_most']} bytes")
        if one["answered"]:
            plain = one["setting"].replace(", embedding on the host", "")
            ids.setdefault((one["shape"], plain), {})[title] = one["sha256_of_ids"]
    found += [f"other tokens: {' and '.join(same)}" for same in ids.values() if len({*same.values()}) > 1]
    return found


def _line(one: dict[str, Any]) -> str:
    title = f"{one['gib']:2} GiB  {one['shape']:4} {one['setting']:45}"
    if "not_run" in one:
        return f"{title} {one['not_run']}"
    if not one["answered"]:
        return f"{title} refused: {one['refused']}; to fix: {one['fix']}"
    most = f"{one['held_at_most'] / 1e9:.2f} GB held at most (planned {one['planned_in_use'] / 1e9:.2f})"
    return f"{title} {one['tokens_per_s']:6.1f} tokens/s, prompt {one['prompt_ms']:.0f} ms, {most}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write machine, command and figures here")
    parser.add_argument("--seconds", type=float, default=130.0, help="no run starts after so many")
    arguments = parser.parse_args()
    device, start, runs = resolve_device("cuda"), time.perf_counter(), []
    for one in all_runs(device, arguments.seconds):
        print(_line(one), flush=True)
        runs.append(one)
    wrong = faults(runs)
    record = {"command": shlex.join(["python", *sys.argv]), "machine": machine(device), "tokens": TOKENS}
    record |= {"runs": runs, "faults": wrong, "s": round(time.perf_counter() - start, 1)}
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for fault in wrong:
        print(fault, file=sys.stderr)
    print(json.dumps(record))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
