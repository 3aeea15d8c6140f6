"""Qwen v1 beyond its training length: a request that is recomputed keeps the rotary base of its prompt."""

from __future__ import annotations

from pathlib import Path

from ingot import LLM, SamplingParams
from ingot.config.runtime import RuntimeConfig


def test_a_preempted_request_keeps_its_base(golden: Path) -> None:
    folder = golden / "qwen_v1_1_safetensors" / "hf"
    prompts = [list(range(3, 3 + n)) for n in (118, 52, 150)]  # bases 3, 1 and 7; the second crosses 64
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    roomy = LLM(folder, device="cpu", max_seq_len=200)
    alone = [roomy.generate([p], params)[0].token_ids for p in prompts]
    tight = LLM(
        folder,
        device="cpu",
        max_seq_len=200,
        runtime=RuntimeConfig(block_size=8, cache_tokens=360, token_budget=64),
    )
    together = [o.token_ids for o in tight.generate(prompts, params)]
    assert tight.executor.num_preemptions > 0
    assert together == alone
    offsets = {tight.engine.model.rope_offset(len(p)) for p in prompts}
    assert len(offsets) == 3
