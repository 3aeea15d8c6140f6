"""The same work by vLLM or by Ingot on an 8B shape with random weights, one side in one process.

Every run has new random prompts; the first run of each kind of work is not timed. The garbage collector of
either side leaves alone what is alive after loading. A decode step's time is that of a run with all new
tokens less the median of those with one, divided by the further tokens. The JSON holds median, p90, least and
most, the machine and its ceiling, the commit and the command.

    python benchmarks/beside_vllm.py vllm benchmarks/shapes/qwen3-8b.json --json FILE    # needs vllm 0.22.1
    python benchmarks/beside_vllm.py ingot benchmarks/shapes/qwen3-8b.json --quant w4a16 --json FILE
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot.measure.bench.ceiling import measure_ceiling
from ingot.measure.side.machine import machine
from ingot.measure.side.token_load import Ask, PromptSource, mixed

LONGEST, REQUESTS = 20480, 256
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 256]  # batch sizes of vLLM's CUDA graphs
QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}  # Qwen2.5's own settings
Run = Callable[[Sequence[Ask], dict[str, Any]], float]  # seconds of these requests at once


@dataclass(frozen=True)
class Work:
    """Requests of one size at once, and how their tokens are drawn; ``repeats`` timed runs of each length."""

    name: str
    batch: int
    prompt: int = 512
    new: int = 128
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    repeats: int = 3


WORKS = (
    Work("b1", 1),
    Work("b8", 8),
    Work("b64", 64),
    Work("b32_qwen_sampling", 32, sampling=QWEN),
    Work("b32_logprobs", 32, sampling={"temperature": 0.0, "logprobs": 5}),
    Work("b1_16k", 1, 16000, 64, repeats=9),  # single runs lie 4 % apart
    Work("b8_16k", 8, 16000, 64, repeats=2),
)


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, p90, least and most; a p90 of so few values is the most."""
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    found = {"p50": statistics.median(ordered), "p90": p90, "least": ordered[0], "most": ordered[-1]}
    return {name: round(value, digits) for name, value in found.items()}


def figures(run: Run, works: Sequence[Work]) -> dict[str, Any]:
    """Milliseconds of each work, and output tokens per second of 256 mixed requests."""
    run([Ask(512, 8)], {"temperature": 0.0})
    found: dict[str, Any] = {}
    for work in works:
        whole, first = ([Ask(work.prompt, new)] * work.batch for new in (work.new, 1))
        run(whole, work.sampling)
        firsts = [run(first, work.sampling) * 1e3 for _ in range(work.repeats)]
        wholes = [run(whole, work.sampling) * 1e3 for _ in range(work.repeats)]
        steps = [(one - statistics.median(firsts)) / (work.new - 1) for one in wholes]
        found[work.name] = {"ttft_ms": spread(firsts, 1), "decode_ms": spread(steps)}
        print(work.name, json.dumps(found[work.name]), flush=True)
    load = mixed(REQUESTS)
    rates = [load.new_tokens / run(load.asks, {"temperature": 0.0}) for _ in range(3)]
    return found | {"mixed_tok_s": spread(rates[1:], 0)}


def by_ingot(shape: Path, quant: str | None, seeds: PromptSource) -> tuple[Run, dict[str, Any]]:
    """Ingot with every default but its limits, warmed up as a server is."""
    from ingot import LLM, SamplingParams

    llm = LLM.from_config(shape, dtype="bf16", max_batch_size=REQUESTS, max_seq_len=LONGEST, quant=quant)
    llm.warm_up()

    def run(asks: Sequence[Ask], sampling: dict[str, Any]) -> float:
        prompts = seeds.prompts(asks)
        params = [SamplingParams(max_new_tokens=one.new_tokens, ignore_eos=True, **sampling) for one in asks]
        begun = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - begun

    return run, {}


def by_vllm(shape: Path, seeds: PromptSource) -> tuple[Run, dict[str, Any]]:
    """vLLM with dummy weights and without prefix caching, which Ingot's new prompts do not use either."""
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    import vllm

    folder = tempfile.mkdtemp()
    shutil.copy(shape, Path(folder) / "config.json")
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": LONGEST,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "max_num_seqs": REQUESTS,
        "compilation_config": {"cudagraph_capture_sizes": CAPTURED},
    }
    engine = vllm.LLM(folder, **settings)

    def run(asks: Sequence[Ask], sampling: dict[str, Any]) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt in seeds.prompts(asks)]
        fixed = {"ignore_eos": True, "detokenize": False} | sampling
        params = [
            vllm.SamplingParams(max_tokens=one.new_tokens, min_tokens=one.new_tokens, **fixed) for one in asks
        ]
        begun = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begun

    return run, {"vllm": vllm.__version__, "settings": settings}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", choices=["vllm", "ingot"])
    parser.add_argument("shape", type=Path)
    parser.add_argument("--quant", choices=["w8a16", "w4a16", "w8a8", "w8a8-fp8"], help="Ingot's scheme")
    parser.add_argument("--works", default=",".join(work.name for work in WORKS), help="some of the works")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    device = torch.device("cuda")
    ceiling = measure_ceiling(device, torch.bfloat16) if given.side == "ingot" else None
    seeds = PromptSource(json.loads(given.shape.read_text(encoding="utf-8"))["vocab_size"] - 2000)
    begun = time.perf_counter()
    run, facts = (
        by_vllm(given.shape, seeds) if given.side == "vllm" else by_ingot(given.shape, given.quant, seeds)
    )
    facts["start_s"] = round(time.perf_counter() - begun, 1)
    gc.collect()
    gc.freeze()  # as both servers do after loading: no collection walks all libraries during a run
    works = [work for work in WORKS if work.name in given.works.split(",")]
    record = {
        "command": shlex.join(["python", "benchmarks/beside_vllm.py", *sys.argv[1:-1], "FILE"]),
        "side": given.side,
        "shape": given.shape.stem,
        "scheme": given.quant or "none",
        **facts,
        "results": figures(run, works),
        "ceiling": ceiling and {"read_gb_s": ceiling.read_gb_s, "matmul_tflop_s": ceiling.matmul_tflop_s},
        "machine": machine(device),
        "card": str(torch.cuda.get_device_properties(device).uuid),
    }
    given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
