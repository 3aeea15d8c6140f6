"""vLLM on the 7B shape, with the prompts, lengths and method of ``headline.py``; needs vllm 0.22.1 and a GPU.

Weights are dummies: speed does not depend on their values. One run of each figure after one that warms up.

    python benchmarks/reference/vllm.py w8a8        # fp16, w8a16, w4a16, w8a8; JSON on the last line
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ingot.measure.side.token_load import mixed

SHAPE = Path(__file__).parents[1] / "shapes" / "llama-7b.json"
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def quantization(form: str) -> dict[str, Any]:
    """The part of config.json that says how the linear layers are stored; empty for fp16."""
    if form == "fp16":
        return {}
    bits: dict[str, Any] = {"num_bits": int(form[1]), "type": "int", "symmetric": True, "dynamic": False}
    wide = {"strategy": "group", "group_size": 128} if form == "w4a16" else {"strategy": "channel"}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": bits | wide}
    if form == "w8a8":
        group["input_activations"] = {**bits, "num_bits": 8, "strategy": "token", "dynamic": True}
    packed = "int-quantized" if form == "w8a8" else "pack-quantized"
    found = {"quant_method": "compressed-tensors", "format": packed, "ignore": ["lm_head"]}
    return {"quantization_config": found | {"config_groups": {"group_0": group}}}


def main() -> None:
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    form, rng = sys.argv[1], random.Random(0)
    config = json.loads(SHAPE.read_text(encoding="utf-8")) | {"bos_token_id": 1, "eos_token_id": 2}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config | quantization(form)), encoding="utf-8")
    engine = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float16",
        max_model_len=4096,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        max_num_seqs=256,
        compilation_config={"cudagraph_capture_sizes": SIZES},
    )

    def seconds(lengths: list[tuple[int, int]]) -> float:
        prompts = [{"prompt_token_ids": rng.choices(range(100, 150000), k=n)} for n, _ in lengths]
        params = [
            SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
            for _, new in lengths
        ]
        begun = time.time()
        engine.generate(prompts, params, use_tqdm=False)
        return time.time() - begun

    seconds([(512, 8)])  # warms up
    found: dict[str, Any] = {"decode_ms": {}, "ttft_ms": {}}
    for batch in (1, 8, 32, 64):
        first, whole = (min(seconds([(512, n)] * batch) for _ in range(k)) for n, k in ((1, 2), (128, 1)))
        found["ttft_ms"][batch] = round(first * 1e3, 1)
        found["decode_ms"][batch] = round((whole - first) / 127 * 1e3, 3)
    found["prefill_2048_ms"] = round(min(seconds([(2048, 1)]) for _ in range(4)) * 1e3, 1)
    load = mixed(256)
    spent = seconds([(a.prompt_tokens, a.new_tokens) for a in load.asks])
    print(json.dumps(found | {"mixed_output_tokens_per_s": round(load.new_tokens / spent, 1)}))


if __name__ == "__main__":
    main()
