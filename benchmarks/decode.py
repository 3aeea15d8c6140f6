"""Build, memory and decode time of a checkpoint, beside Hugging Face's on the same weights.

Each side runs in a process of its own, so that peak host memory is its own. Decode time is (time of N new
tokens - time of 1) / (N - 1), the median of several runs; both sides generate greedily and ignore end tokens.

    python benchmarks/decode.py CHECKPOINT --work DIR --batch 1,8 --json docs/results/decode_7b.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROMPT, NEW = 512, 128
SECTIONS = ("build", "ingot", "huggingface")


def peak_host_gb() -> dict[str, float]:
    """Peak resident memory of this process; ``anonymous`` leaves out mapped files as they are now."""
    status = Path("/proc/self/status").read_text()
    fields = {
        k: v.split()[0] for k, _, v in (line.partition(":") for line in status.splitlines()) if v.split()
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_host_gb": round(peak / 1e6, 2), "anonymous_gb": round(int(fields["RssAnon"]) / 1e6, 2)}


def measure_build(checkpoint: Path, engine: Path) -> dict[str, Any]:
    """Seconds and peak host memory of ``ingot build``."""
    from ingot import build

    start = time.perf_counter()
    build(checkpoint, engine, dtype="fp16", max_batch_size=64, max_seq_len=4096, force=True)
    seconds = time.perf_counter() - start
    size = sum(f.stat().st_size for f in engine.iterdir() if f.is_file())
    shard = max(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    return {
        "build_s": round(seconds, 1),
        "engine_gb": round(size / 1e9, 2),
        "largest_shard_gb": round(shard / 1e9, 2),
        **peak_host_gb(),
    }


def decode_times(generate: Callable[[int, int], None], batches: list[int], repeats: int) -> dict[str, Any]:
    """Milliseconds a decode step by batch size; ``generate(batch, new)`` runs to the end."""

    def seconds(batch: int, new: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        generate(batch, new)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    found: dict[str, Any] = {}
    for batch in batches:
        seconds(batch, NEW)
        steps = []
        for _ in range(repeats):
            first = seconds(batch, 1)
            steps.append((seconds(batch, NEW) - first) / (NEW - 1) * 1e3)
        found[f"batch_{batch}"] = {
            "decode_ms_median": round(statistics.median(steps), 3),
            "decode_ms_all": [round(step, 3) for step in steps],
            "ttft_ms": round(first * 1e3, 1),
        }
    return found


def prompts(batch: int) -> list[list[int]]:
    """Random prompts, new ones at every call, so that no prefix is ever reused."""
    return torch.randint(100, 150000, (batch, PROMPT)).tolist()


def measure_ingot(engine: Path, batches: list[int], repeats: int) -> dict[str, Any]:
    """Load time, memory and decode time of an engine."""
    from ingot import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(engine, device="cuda")
    load = time.perf_counter() - start
    weights = sum(p.nbytes for p in llm.engine.model.parameters())
    cache = sum(c.keys.nbytes + c.values.nbytes for c in llm.executor.runner.caches)

    def generate(batch: int, new: int) -> None:
        llm.generate(prompts(batch), SamplingParams(max_new_tokens=new, ignore_eos=True))

    times = decode_times(generate, batches, repeats)
    free, total = torch.cuda.mem_get_info()
    return {
        "load_s": round(load, 1),
        "weights_gb": round(weights / 1e9, 2),
        "kv_cache_gb": round(cache / 1e9, 2),
        "peak_gpu_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "gpu_used_gb": round((total - free) / 1e9, 2),
        **peak_host_gb(),
        **times,
    }


def measure_huggingface(checkpoint: Path, batches: list[int], repeats: int) -> dict[str, Any]:
    """The same of ``AutoModelForCausalLM.generate`` (fp16, its default attention and cache)."""
    import transformers

    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16).cuda().eval()
    load = time.perf_counter() - start

    def generate(batch: int, new: int) -> None:
        ids = torch.tensor(prompts(batch), device="cuda")
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )

    times = decode_times(generate, batches, repeats)
    return {
        "version": transformers.__version__,
        "load_s": round(load, 1),
        "peak_gpu_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        **peak_host_gb(),
        **times,
    }


def run_section(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One side, in this process."""
    batches = [int(b) for b in arguments.batch.split(",")]
    engine = arguments.work / "engine"
    if name == "build":
        return measure_build(arguments.checkpoint, engine)
    if name == "ingot":
        return measure_ingot(engine, batches, arguments.repeats)
    return measure_huggingface(arguments.checkpoint, batches, arguments.repeats)


def main() -> None:
    """Run every section in a process of its own and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for the engine")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--section", choices=SECTIONS)
    arguments = parser.parse_args()
    if arguments.section:
        print(json.dumps(run_section(arguments.section, arguments)))
        return
    results: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
    }
    for name in SECTIONS:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--section", name], stdout=subprocess.PIPE, text=True, check=True
        )
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, results[name], file=sys.stderr, flush=True)
    text = json.dumps(results, indent=1)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
