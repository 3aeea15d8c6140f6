"""Prefill of one prompt through a whole decoder with random weights: wall time, GPU time, each kernel.

The wall time is that of ``Executor.add`` and ``step``: from token ids on the host to the first sampled token
on the host; for a prompt that comes to an idle GPU, and for prompts one after another, when an H200 lowers
its clock to keep its power. The GPU time is the sum of the kernels of one step after an idle moment; the
floors beside it are the step's operations at 677 TFLOP/s (cuBLAS, 8192 cubed, sustained) and its bytes at
4258 GB/s (copy), measured on an H200.

    python benchmarks/prefill.py --tokens 64,512,2048 --json docs/results/prefill_7b.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot import SamplingParams
from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.layers.build_context import BuildContext
from ingot.layers.decoder import Decoder
from ingot.runtime.executor import Executor
from ingot.runtime.setup import make_executor

SHAPES = {
    "7b": DecoderConfig(
        "llama", 151936, 4096, 11008, 32, num_heads=32, num_kv_heads=32, head_dim=128, max_positions=8192,
        rope=RopeConfig(dim=128),
    ),
    "gpt2-medium": DecoderConfig(
        "gpt2", 50257, 1024, 4096, 24, num_heads=16, num_kv_heads=16, head_dim=64, max_positions=1024,
        norm="layer_norm", norm_eps=1e-5, mlp="gelu_tanh", qkv_bias=True, output_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
TFLOPS, GBPS = 677.0, 4258.0
PAUSE = 0.4  # seconds in which the GPU is idle, so that its clock is up again


def random_decoder(config: DecoderConfig, dtype: torch.dtype, max_seq_len: int) -> Decoder:
    """A decoder on the GPU: matrices of standard deviation 0.02, norms of ones, biases small."""
    context = BuildContext(QuantConfig(), KernelPlan(), dtype)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(config, context, max_seq_len).to("cuda").eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 or name.endswith("bias"):
            weight.data.normal_(0.0, 0.02)
        else:
            weight.data.fill_(1.0)
    return model


def executor_of(
    model: Decoder, dtype: torch.dtype, max_seq_len: int, options: Mapping[str, bool] | None = None
) -> Executor:
    """The engine's own step loop over the model, without prefix reuse; ``options`` go to RuntimeConfig."""
    runtime = RuntimeConfig(prefix_reuse=False, cache_tokens=16 * max_seq_len, **(options or {}))
    return make_executor(
        model, torch.device("cuda"), dtype, stop_ids=frozenset(), max_batch_size=8, max_seq_len=max_seq_len,
        config=runtime,
    )  # fmt: skip


def prefill(executor: Executor, prompt: Sequence[int]) -> float:
    """Seconds from the prompt's ids to its first sampled token."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    executor.add("r", prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
    while executor.has_work:
        executor.step()
    return time.perf_counter() - start


def kernel_times(executor: Executor, prompt: Sequence[int], steps: int) -> dict[str, tuple[int, float]]:
    """Launches and µs of one prefill by kernel, the mean over ``steps`` of them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            time.sleep(PAUSE)
            prefill(executor, prompt)
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
    return {name: (len(times) // steps, sum(times) / steps) for name, times in found.items()}


def floors_us(config: DecoderConfig, tokens: int) -> dict[str, float]:
    """µs that the step's operations take at the machine's ceilings, by part, over all layers."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    gated = 2 if config.mlp == "silu_gated" else 1
    qkv = config.q_size + 2 * config.kv_size
    weights = hidden * qkv + config.q_size * hidden + hidden * inner * (gated + 1)
    attention = 2 * tokens * (tokens + 1) * config.q_size  # two products over the causal half
    element = 2 * tokens * layers / GBPS / 1e3  # µs that one fp16 value a token and layer takes
    return {
        "products": 2 * tokens * weights * layers / TFLOPS / 1e6,
        "attention": attention * layers / TFLOPS / 1e6,
        "norms": 2 * 4 * hidden * element,
        "activation": (gated + 1) * inner * element,
        "rotary_and_cache": 2 * qkv * element,
        "head": 2 * config.vocab_size * hidden / GBPS / 1e3,
    }


def measure(executor: Executor, config: DecoderConfig, tokens: int, repeats: int) -> dict[str, Any]:
    """Everything about prompts of this many tokens."""

    def prompt() -> list[int]:
        return torch.randint(0, config.vocab_size, (tokens,)).tolist()

    def wall_ms(pause: float) -> float:
        ids = prompt()
        time.sleep(pause)
        return prefill(executor, ids) * 1e3

    for _ in range(5):
        wall_ms(0.0)
    idle = sorted(wall_ms(PAUSE) for _ in range(repeats))
    sustained = sorted(wall_ms(0.0) for _ in range(repeats))
    kernels = kernel_times(executor, prompt(), steps=3)
    floors = floors_us(config, tokens)
    table = [
        {"kernel": name[:90], "launches": count, "us": round(us, 1)}
        for name, (count, us) in sorted(kernels.items(), key=lambda item: -item[1][1])
    ]
    return {
        "tokens": tokens,
        "wall_ms_median": round(statistics.median(idle), 3),
        "wall_ms_p90": round(idle[int(0.9 * (len(idle) - 1))], 3),
        "sustained_ms_median": round(statistics.median(sustained), 3),
        "sustained_ms_p90": round(sustained[int(0.9 * (len(sustained) - 1))], 3),
        "gpu_ms": round(sum(us for _, us in kernels.values()) / 1e3, 3),
        "floor_ms": round(sum(floors.values()) / 1e3, 3),
        "floors_us": {name: round(us, 1) for name, us in floors.items()},
        "kernels": table,
    }


def main() -> None:
    """Measure each length and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--tokens", default="64,128,256,512,1024,2048")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--graphs", action="store_true", help="short prompts as CUDA graphs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = SHAPES[arguments.shape]
    config = config.replace(num_layers=arguments.layers) if arguments.layers else config
    lengths = [int(n) for n in arguments.tokens.split(",")]
    longest = min(max(lengths) + 64, config.max_positions)
    model = random_decoder(config, torch.float16, longest)
    options = {"cuda_graphs": arguments.graphs}
    executor = executor_of(model, torch.float16, longest, options)
    rows = []
    for tokens in lengths:
        rows.append(measure(executor, config, tokens, arguments.repeats))
        short = {k: v for k, v in rows[-1].items() if k != "kernels"}
        print(json.dumps(short), *map(str, rows[-1]["kernels"][:14]), sep="\n", file=sys.stderr, flush=True)
    results = {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": arguments.shape,
        "prefill": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
