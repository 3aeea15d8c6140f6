"""What batch invariance costs at the shape of a 7B model, and what holds without it.

Random weights of a LLaMA shape, made on the GPU. Decode time is (time of N new tokens - time of 1) / (N - 1),
a prompt's time that of its first token; median and 90th percentile of several runs, with the mode and
without, on the same weights in the same process. The texts are greedy answers, each alone and eight together.

    python benchmarks/batch_invariance.py --json docs/results/batch_invariant.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import graph_us

from ingot import LLM, SamplingParams
from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.kernels.product.invariant_linear import invariant_linear
from ingot.layers.build_context import BuildContext
from ingot.layers.decoder import Decoder
from ingot.runtime.executor import Executor
from ingot.runtime.setup import make_executor

VOCABULARY, PROMPT, NEW, PREFILL, LONGEST, MOST = 151936, 512, 128, 2048, 4096, 32
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def random_decoder(layers: int, dtype: torch.dtype) -> Decoder:
    """A 7B LLaMA with Qwen's vocabulary, normal weights of about unit gain."""
    config = DecoderConfig(
        architecture="llama",
        vocab_size=VOCABULARY,
        hidden_size=4096,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=11008,
        max_positions=LONGEST,
        rope=RopeConfig(dim=128),
    )
    with torch.device("cuda"):
        model = Decoder(config, BuildContext(QuantConfig(), KernelPlan(), dtype), LONGEST)
        generator = torch.Generator("cuda").manual_seed(0)
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        model.embed_tokens.weight.normal_(0.0, 1.0, generator=generator)
    return model.cuda().eval()


def executor_of(model: Decoder, dtype: torch.dtype, batch_invariant: bool) -> Executor:
    """The mode cannot be left again: the one without it is made first."""
    config = RuntimeConfig(cache_tokens=MOST * 1024, prefix_reuse=False, batch_invariant=batch_invariant)
    return make_executor(
        model,
        torch.device("cuda", 0),
        dtype,
        stop_ids=frozenset(),
        max_batch_size=MOST,
        max_seq_len=LONGEST,
        config=config,
    )


def answer(executor: Executor, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    """Greedy answers, in flight together."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(found, prompts, strict=True):
        executor.add(name, prompt, params)
    while executor.has_work:
        for update in executor.step():
            found[update.request_id] += update.token_ids
    return list(found.values())


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids that are the same on every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, VOCABULARY, (count, length), generator=generator).tolist()


def seconds(executor: Executor, batch: int, length: int, new: int) -> float:
    """Time of one run to its end."""
    prompts = random_prompts(batch, length, seed=batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    answer(executor, prompts, new)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def summary(times: list[float]) -> dict[str, float]:
    """Milliseconds: median and 90th percentile."""
    ordered = sorted(times)
    return {
        "median": round(statistics.median(ordered) * 1e3, 3),
        "p90": round(ordered[int(0.9 * (len(ordered) - 1) + 0.5)] * 1e3, 3),
    }


def speed(executor: Executor, batches: list[int], repeats: int) -> dict[str, Any]:
    """Decode and prefill milliseconds."""
    found: dict[str, Any] = {}
    for batch in batches:
        seconds(executor, batch, PROMPT, NEW)
        steps = []
        for _ in range(repeats):
            first = seconds(executor, batch, PROMPT, 1)
            steps.append((seconds(executor, batch, PROMPT, NEW) - first) / (NEW - 1))
        found[f"decode_ms_batch_{batch}"] = summary(steps)
    seconds(executor, 1, PREFILL, 1)
    found[f"prefill_{PREFILL}_ms"] = summary([seconds(executor, 1, PREFILL, 1) for _ in range(3 * repeats)])
    return found


def share_that_differs(executor: Executor, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Greedy texts that are another when their prompt is answered among seven others."""
    alone = [answer(executor, [prompt], new)[0] for prompt in prompts]
    together = [text for i in range(0, len(prompts), 8) for text in answer(executor, prompts[i : i + 8], new)]
    differing = sum(a != b for a, b in zip(alone, together, strict=True))
    return {"texts": len(prompts), "new_tokens": new, "differ": differing}


def trained(folder: Path, conversations: Path, count: int, dtype: str) -> dict[str, Any]:
    """The same of a trained chat model and the first conversations of a JSONL file."""
    lines = conversations.read_text().splitlines()[:count]
    found = {}
    for batch_invariant in (False, True):
        runtime = RuntimeConfig(cache_tokens=16384, prefix_reuse=False, batch_invariant=batch_invariant)
        llm = LLM(folder, "cuda", compute_dtype=dtype, runtime=runtime)
        prompts = [llm.chat_ids(json.loads(line)["messages"]) for line in lines]
        name = "batch_invariant" if batch_invariant else "default"
        found[name] = share_that_differs(llm.executor, prompts, 64)
    return found


def call_us(call: Callable[[int], Any], copies: int) -> float:
    """Median microseconds of one call over the copies in turn, all in one CUDA graph."""
    times = graph_us([partial(call, copy) for copy in range(copies)], repeats=9)
    return round(statistics.median(times) / copies, 1)


def products(model: Decoder, rows: list[int]) -> dict[str, Any]:
    """Microseconds of a layer's products by number of rows: the matrix library's and the invariant one's."""
    found: dict[str, Any] = {}
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        weights = [layer.get_submodule(name).weight for layer in list(model.layers)[:8]]
        for count in rows:
            x = torch.randn(count, weights[0].shape[1], device="cuda", dtype=weights[0].dtype)
            library = call_us(lambda i: F.linear(x, weights[i]), len(weights))  # noqa: B023
            invariant = call_us(lambda i: invariant_linear(x, weights[i]), len(weights))  # noqa: B023
            row = {"library_us": library, "invariant_us": invariant}
            found[f"{name.partition('.')[2]}.{count}"] = row | {"of_library": round(library / invariant, 2)}
    return found


def main() -> None:
    """Measure without the mode, then with it, and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--checkpoint", type=Path, help="a chat model, to count its texts too")
    parser.add_argument("--conversations", type=Path, default=Path("recipes/heldout.jsonl"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    batches = [int(b) for b in arguments.batch.split(",")]
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "layers": arguments.layers,
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
    }
    if arguments.checkpoint:
        results["trained"] = trained(arguments.checkpoint, arguments.conversations, 96, arguments.dtype)
    dtype = DTYPES[arguments.dtype]
    model = random_decoder(arguments.layers, dtype)
    results["products"] = products(model, [1, 8, 32, 64, 128, 256, 512, 1024, 2048])
    for batch_invariant in (False, True):
        executor = executor_of(model, dtype, batch_invariant)
        texts = random_prompts(arguments.texts, 64, seed=5)
        found = speed(executor, batches, arguments.repeats)
        found["alone_and_among_8"] = share_that_differs(executor, texts, 64)
        results["batch_invariant" if batch_invariant else "default"] = found
        print(found, file=sys.stderr, flush=True)
        del executor
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
