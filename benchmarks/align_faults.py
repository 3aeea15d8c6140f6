"""Small faults by schemes: what ``ingot align`` says of the pocket model's engines beside their original; and
of sound engines of many seeds, which must all be aligned.

The table's original is a Qwen2 of the pocket model's weights, which Hugging Face's class runs. ``qwen v1`` is
the pocket model itself, which the checking decoder runs. Each column is a process of its own.

    python benchmarks/align_faults.py --dtypes fp16,bf16 --jobs 8 --json docs/results/align_faults_gpu.json
    python benchmarks/align_faults.py --device cpu --seeds 100 --json docs/results/align_false_alarms_cpu.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from benchmarks.false_alarms import SCHEMES as SEED_SCHEMES
from ingot import build
from ingot.device import resolve_device
from ingot.measure.align.align_session import Report, align
from ingot.measure.side.machine import machine
from recipes.random_checkpoint import write_samples
from tests.e2e.faults import POCKET, SCHEMES, SMALL, build_scheme, faulty
from tests.e2e.tiny import write_tiny
from tests.tiny_models import random_ids, save_model, tiny_config

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, 2 + 2 was four, and people walked on the moon. "
    "What is the capital of France? The capital of France is"
)
QWEN_V1 = "qwen v1"
COLUMNS = (*(name for name in SCHEMES if "cache" not in name), QWEN_V1)
KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "qwen v1")
DTYPES = ("fp16", "bf16", "fp32")
Row = dict[str, Any]


def as_qwen2(folder: Path) -> Path:
    """The pocket model as a Qwen2, which computes the same within its training length."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config

    own = json.loads((POCKET / "config.json").read_text())
    size = own["hidden_size"]
    config = Qwen2Config(
        vocab_size=own["vocab_size"],
        hidden_size=size,
        intermediate_size=own["intermediate_size"] // 2,
        num_hidden_layers=own["num_hidden_layers"],
        num_attention_heads=own["num_attention_heads"],
        num_key_value_heads=own["num_attention_heads"],
        max_position_embeddings=own["seq_length"],
        rms_norm_eps=own["layer_norm_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": float(own["rotary_emb_base"])},
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(POCKET.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors |= _renamed(name, tensor, size)
    folder.mkdir(parents=True)
    config.dtype = next(iter(tensors.values())).dtype
    config.save_pretrained(folder)
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def _renamed(name: str, tensor: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    names = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
    names |= {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
    }
    names |= {"mlp.w1": "mlp.up_proj", "mlp.w2": "mlp.gate_proj", "mlp.c_proj": "mlp.down_proj"}
    path, _, leaf = name.rpartition(".")
    if not path.startswith("transformer.h."):
        return {f"{names[path]}.{leaf}": tensor}
    _, _, layer, module = path.split(".", 3)
    start = f"model.layers.{layer}"
    if module == "attn.c_attn":
        parts = zip("qkv", tensor.split(size), strict=True)
        return {f"{start}.self_attn.{part}_proj.{leaf}": own for part, own in parts}
    return {f"{start}.{names[module]}.{leaf}": tensor}


def worst(report: Report) -> tuple[float, str]:
    """The largest deviation, as a multiple of its limit, and where it is."""
    shares = [(row.difference.relative / row.limit, row.stage) for row in report.rows]
    shares += [(row.alone.share, row.alone.place) for row in report.rows if row.alone is not None]
    return max(shares)


def column(job: tuple[str, str, str, Path, tuple[str, ...]]) -> list[Row]:
    """One scheme in one dtype: its engine sound, and with every fault."""
    scheme, dtype, device, original, faults = job
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as work:
        checkpoint = POCKET if scheme == QWEN_V1 else original
        own = "dense" if scheme == QWEN_V1 else scheme
        samples = Path(work) / "samples.jsonl"
        write_samples(samples, 3000, 16, 64)
        options = {"source": checkpoint, "calib": samples, "proof": False, "dtype": dtype}
        engine = build_scheme(own, Path(work) / "engine", device, **options)
        for fault in ("", *faults):
            start = time.perf_counter()
            with faulty(fault or None):
                prompts = [TEXT] if scheme == QWEN_V1 else [random_ids(48, vocab_size=3000)]
                report = align(engine, checkpoint, prompts, steps=2, device=device)
            share, place = worst(report)
            found = {"verdict": "aligned" if report.aligned else "diverged", "most": round(share, 3)}
            place = report.first_stage or place
            seconds = round(time.perf_counter() - start, 1)
            who = {"scheme": scheme, "dtype": dtype, "compute": report.dtype, "fault": fault or None}
            rows.append(who | found | {"first": place, "seconds": seconds})
            print(line_of(rows[-1]), flush=True)
    return rows


def line_of(row: Row) -> str:
    """A row as a line."""
    what = f"{row['scheme']:<12} {row['dtype']:<5} {row['fault'] or 'sound':<24} {row['verdict']:<8}"
    return f"{what} {row['seconds']:5.1f} s  {row['most']:g} at {row['first']}"


def sound(job: tuple[int, str]) -> Row:
    """Build and align the engine of a seed."""
    seed, device = job
    torch.set_num_threads(1)
    names = list(SEED_SCHEMES)
    scheme, kind = names[seed % len(names)], KINDS[seed // len(names) % len(KINDS)]
    if kind in ("gpt2", "gemma2") and scheme == "w4a8":
        kind = "llama"  # a LayerNorm cannot be rotated, nor a norm behind a branch
    turn = seed // len(names)
    dtype, compute = DTYPES[(turn + seed) % 3], ("auto", *DTYPES)[(turn + seed) % 4]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        if kind == QWEN_V1:
            write_tiny(folder / "checkpoint", seed=seed)
            vocabulary = 200
        else:
            config = tiny_config(kind)
            save_model(config, folder / "checkpoint", seed=seed)
            vocabulary = config.vocab_size
        samples = {}
        if "static" in scheme or "rptq" in scheme:
            write_samples(folder / "samples.jsonl", vocabulary, 8, 64)
            samples = {"calib": folder / "samples.jsonl"}
        options = {"device": device, "dtype": dtype, "tune": False, "proof": False}
        engine = build(folder / "checkpoint", folder / "e", **options, **SEED_SCHEMES[scheme], **samples)
        prompts = [random_ids(5 + seed % 40, seed=seed, vocab_size=vocabulary)]
        report = align(engine, folder / "checkpoint", prompts, steps=2, device=device, dtype=compute)
    share, place = worst(report)
    who = {"seed": seed, "kind": kind, "scheme": scheme, "dtype": dtype, "compute": report.dtype}
    first = report.first_stage or place
    return who | {
        "verdict": "aligned" if report.aligned else "diverged",
        "most": round(share, 3),
        "first": first,
    }


def table(args: argparse.Namespace) -> dict[str, Any]:
    """Every column, added to those that the file has."""
    faults = () if args.faults == "none" else tuple(args.faults.split(","))
    with tempfile.TemporaryDirectory() as work:
        original = as_qwen2(Path(work) / "qwen2")
        columns = [(s, d) for d in args.dtypes.split(",") for s in args.schemes.split(",")]
        jobs = [(scheme, dtype, args.device, original, faults) for scheme, dtype in columns]
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            rows = [row for own in pool.map(column, jobs, chunksize=1) for row in own]
    kept = json.loads(args.json.read_text())["rows"] if args.json and args.json.is_file() and args.add else []
    new = {(row["scheme"], row["dtype"]) for row in rows}
    return {"rows": [row for row in kept if (row["scheme"], row["dtype"]) not in new] + rows}


def false_alarms(args: argparse.Namespace) -> dict[str, Any]:
    """The engines of all seeds."""
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        rows = pool.map(sound, [(seed, args.device) for seed in range(args.seeds)], chunksize=1)
    alarms = [row for row in rows if row["verdict"] != "aligned"]
    for row in alarms:
        print(row)
    most = max(row["most"] for row in rows)
    print(f"{len(alarms)} of {len(rows)} sound engines diverged; the largest share of a limit is {most}")
    return {"builds": len(rows), "false_alarms": len(alarms), "most": most, "rows": rows}


def main() -> None:
    """The table, or with ``--seeds`` the sound engines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--schemes", default=",".join(COLUMNS))
    parser.add_argument("--dtypes", default="fp16", help="of the engines; a CPU computes in fp32")
    parser.add_argument("--faults", default=",".join(SMALL), help="none: sound engines only")
    parser.add_argument("--seeds", type=int, default=0, help="sound engines of so many seeds instead")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--add", action="store_true", help="keep the columns that the file has")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start = time.perf_counter()
    found = false_alarms(args) if args.seeds else table(args)
    report = {"command": shlex.join(["python", *sys.argv]), "machine": machine(resolve_device(args.device))}
    report |= {"seconds": round(time.perf_counter() - start, 1)} | found
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
