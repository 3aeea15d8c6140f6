"""Models of drawn sizes and settings give Hugging Face's logits, at once and token by token over a cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from tests.tiny_models import random_ids, save_model, tiny_config

SEEDS = {"gemma3": 12, "gemma2": 6, "qwen3": 6, "llama": 6, "mistral": 6}
FAST = tuple(f"gemma3-{seed}" for seed in range(3))
GREEDY = SamplingParams(max_new_tokens=9, ignore_eos=True)
NEAR = 2e-4  # of the largest logit


def rotary(pick: random.Random) -> dict[str, Any]:
    scaling = pick.choice([{"rope_type": "default"}, {"rope_type": "linear", "factor": pick.choice([2, 8])}])
    return {"rope_theta": pick.choice([20.0, 1e4, 1e6]), **scaling}


def drawn(kind: str, seed: int) -> dict[str, Any]:
    """Changes of a kind's tiny config."""
    pick = random.Random(f"{kind} {seed}")
    kv_heads, group = pick.choice([1, 2, 3]), pick.choice([1, 2, 4])
    heads, layers = kv_heads * group, pick.choice([1, 3, 7])
    found: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * pick.choice([4, 12]),
        "head_dim": pick.choice([8, 12, 20, 32]),
        "intermediate_size": pick.choice([17, 48]),
        "num_hidden_layers": layers,
        "vocab_size": pick.choice([97, 131]),
        "rms_norm_eps": pick.choice([1e-6, 1e-3]),
        "tie_word_embeddings": pick.random() < 0.5,
        "rope_parameters": rotary(pick),
    }
    if kind in ("gemma2", "gemma3", "mistral"):
        found["sliding_window"] = pick.choice([1, 2, 5, 16, 200])
    if kind in ("gemma2", "gemma3"):
        kinds = ["sliding_attention", "full_attention"]
        found["query_pre_attn_scalar"] = pick.choice([1, 12, 256])
        found["layer_types"] = [pick.choice(kinds) for _ in range(layers)]
        found["final_logit_softcapping"] = pick.choice([None, 4.0])
    if kind == "gemma3":
        found["rope_parameters"] = {name: rotary(pick) for name in kinds}
        if pick.random() < 0.5:  # as published: by a pattern
            del found["layer_types"]
            found["sliding_window_pattern"] = pick.choice([1, 2, 6])
    return found


@pytest.mark.stays(*FAST)
@pytest.mark.parametrize(
    ("kind", "seed"), [(kind, seed) for kind, count in SEEDS.items() for seed in range(count)]
)
def test_logits_and_what_is_decoded(kind: str, seed: int, tmp_path: Path) -> None:
    model = save_model(tiny_config(kind, **drawn(kind, seed)), tmp_path, seed=seed)
    llm = LLM(tmp_path, "cpu", runtime=RuntimeConfig(block_size=16, token_budget=24))
    prompt = random_ids(50, seed=seed)
    ids = prompt + llm.generate(prompt, GREEDY)[0].token_ids
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0].float()
    largest = float(theirs.abs().max())
    assert float((llm.logits(ids) - theirs).abs().max()) <= NEAR * largest
    chosen = theirs[len(prompt) - 1 : -1]
    below = chosen.max(dim=-1).values - chosen.gather(1, torch.tensor(ids[len(prompt) :])[:, None])[:, 0]
    assert float(below.max()) <= 2 * NEAR * largest, "each token was a likeliest one"
