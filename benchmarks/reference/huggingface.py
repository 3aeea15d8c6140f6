"""Hugging Face's generate with a static cache, which compiles the forward pass; needs transformers and a GPU.

The 7B shape in fp16 with random weights, batch 1, 512 prompt tokens and 128 new ones. Eager generate is
measured by ``ingot bench latency … --against hf``.

    python benchmarks/reference/huggingface.py      # JSON on the last line
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = Path(__file__).parents[1] / "shapes" / "llama-7b.json"
PROMPT, NEW = 512, 128


def main() -> None:
    config = LlamaConfig(**json.loads(SHAPE.read_text(encoding="utf-8")))
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()

    @torch.inference_mode()
    def seconds(new: int) -> float:
        ids = torch.randint(100, 150000, (1, PROMPT), device="cuda")
        given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
        torch.cuda.synchronize()
        begun = time.time()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, cache_implementation="static", **given)
        torch.cuda.synchronize()
        return time.time() - begun

    compiled = seconds(NEW) + seconds(NEW)
    first, whole = seconds(1), seconds(NEW)
    step = (whole - first) / (NEW - 1) * 1e3
    print(json.dumps({"compile_s": round(compiled, 1), "decode_ms": {"1": round(step, 2)}}))


if __name__ == "__main__":
    main()
