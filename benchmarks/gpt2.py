"""GPT-2 medium, random weights: 512 tokens in, 100 out at batch 1, beside Hugging Face on the same weights.

Both sides run in this process on one GPU, greedily, ignoring end tokens; a run is timed from ids on the host
to ids on the host. Hugging Face runs with its default attention and cache, eager.

    python benchmarks/gpt2.py --work /tmp/gpt2 --json docs/results/gpt2_medium.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from ingot import build

PROMPT, NEW, VOCAB = 512, 100, 50257
SHAPES = {"small": (12, 768, 12), "medium": (24, 1024, 16)}  # layers, hidden size, heads


def write_checkpoint(folder: Path, shape: str) -> None:
    """A random fp16 checkpoint as Hugging Face initialises it."""
    layers, hidden, heads = SHAPES[shape]
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads)
    transformers.GPT2LMHeadModel(config).half().save_pretrained(folder)


def timed(generate: Callable[[list[int], int], None], repeats: int) -> dict[str, Any]:
    """Seconds of whole runs and of the first token, median and p90 of ``repeats`` runs after two more."""

    def seconds(new: int) -> float:
        prompt = torch.randint(0, VOCAB, (PROMPT,)).tolist()
        torch.cuda.synchronize()
        start = time.perf_counter()
        generate(prompt, new)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    found: dict[str, Any] = {}
    for name, new in (("total_s", NEW), ("first_token_s", 1)):
        for _ in range(2):
            seconds(new)
        runs = sorted(seconds(new) for _ in range(repeats))
        found[f"{name}_median"] = round(statistics.median(runs), 5)
        found[f"{name}_p90"] = round(runs[int(0.9 * (len(runs) - 1))], 5)
    step = (found["total_s_median"] - found["first_token_s_median"]) / (NEW - 1)
    return {**found, "decode_ms": round(step * 1e3, 4)}


def measure_ingot(engine: Path, repeats: int, **options: bool) -> dict[str, Any]:
    """An engine; ``options`` go to RuntimeConfig."""
    from ingot import LLM, SamplingParams
    from ingot.config.runtime import RuntimeConfig

    llm = LLM(engine, device="cuda", runtime=RuntimeConfig(prefix_reuse=False, cache_tokens=8192, **options))

    def generate(prompt: list[int], new: int) -> None:
        llm.generate(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True))

    return timed(generate, repeats)


def measure_huggingface(checkpoint: Path, repeats: int) -> dict[str, Any]:
    """``generate`` of the class, fp16."""
    model = transformers.GPT2LMHeadModel.from_pretrained(checkpoint, dtype=torch.float16).cuda().eval()

    def generate(prompt: list[int], new: int) -> None:
        ids = torch.tensor([prompt], device="cuda")
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()

    return timed(generate, repeats)


def main() -> None:
    """Measure both and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint and engine")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="medium")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    checkpoint, engine = arguments.work / "checkpoint", arguments.work / "engine"
    write_checkpoint(checkpoint, arguments.shape)
    build(checkpoint, engine, dtype="fp16", max_batch_size=8, force=True, tune=False)
    ingot = measure_ingot(engine, arguments.repeats)
    print(ingot, file=sys.stderr, flush=True)
    graphs = measure_ingot(engine, arguments.repeats, prompt_graphs=True)
    print(graphs, file=sys.stderr, flush=True)
    folded = measure_ingot(engine, arguments.repeats, plain_decode=True, prompt_graphs=True)
    print(folded, file=sys.stderr, flush=True)
    theirs = measure_huggingface(checkpoint, max(arguments.repeats // 3, 1))
    results = {
        "command": "python " + " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": arguments.shape,
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "ingot": ingot,
        "ingot_prompt_graphs": graphs,
        "ingot_plain_decode_prompt_graphs": folded,
        "huggingface": theirs,
        "times_faster": round(theirs["total_s_median"] / ingot["total_s_median"], 2),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
