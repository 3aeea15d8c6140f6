"""The walks over layers of RPTQ compute what the modules compute.

Both sum the same numbers, but norms and attention sum floats in other orders: now and then a number goes to
its other neighbour.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot import LLM, SamplingParams, build
from ingot.config.quant import QuantConfig
from ingot.config.runtime import RuntimeConfig
from ingot.kernels.int8_tiles import DECODE_ROWS
from ingot.layers import blocks_walk
from ingot.layers.blocks_walk import walks_in_blocks
from ingot.runtime import forward
from tests.parity.walk_ways import count_walks, expect_same
from tests.tiny_models import random_ids, save_model, tiny_config

VARIANTS = {
    "llama": {},
    "llama-mha-bias": {"num_key_value_heads": 4, "attention_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
}
PROMPTS = [[5, 6, 7], list(range(30)), [90]]
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=4)
# of a size that the kernels read in whole tiles
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def engine(
    folder: Path,
    scheme: str,
    group: int = 32,
    dtype: str = "fp32",
    device: str = "cpu",
    head: str = "none",
    **sizes: int,
) -> Path:
    """Of the checkpoint in ``folder``, beside it."""
    samples = folder.with_name("ids.jsonl")
    samples.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return build(
        folder,
        folder.with_name("engine"),
        quant=QuantConfig(scheme, group, head=head),
        dtype=dtype,
        calib=samples,
        device=device,
        proof=False,
        tune=False,
        **sizes,
    )


@pytest.mark.parametrize("scheme", ["rptq-w8a8", "rptq-w4a4"])
@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_plain(name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config(name.partition("-")[0], **VARIANTS[name]), tmp_path / "c", seed=3)
    llm = LLM(engine(tmp_path / "c", scheme), device="cpu")
    llm.executor.runner.forward.fused = False
    plain = llm.generate(PROMPTS, PARAMS)
    seen = count_walks(monkeypatch, "blocks")
    llm.executor.runner.forward.fused = True
    walked = llm.generate(PROMPTS, PARAMS)
    assert seen["blocks_logits"].count(3) >= 14
    assert sum(seen["blocks_hidden"]) >= 34
    assert sum(seen["blocks_hidden"]) < 3 * 14
    expect_same(plain, walked)


@pytest.mark.parametrize(("head", "limit"), [("none", DECODE_ROWS), ("w8a16", DECODE_ROWS), ("none", 69)])
def test_steps_of_more_rows_than_small_products_take(
    head: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 requests decode at once, their logits the matrix library's; where that is beyond what sums are split
    of, by the other walk.
    """
    save_model(tiny_config("llama"), tmp_path / "c", seed=3)
    runtime = RuntimeConfig(cache_tokens=8192, prefix_reuse=False)
    folder = engine(tmp_path / "c", "rptq-w8a8", head=head, max_batch_size=70)
    llm = LLM(folder, device="cpu", runtime=runtime)
    prompts = [[index % 90 + 1, index // 7 + 1] for index in range(70)]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=4)
    llm.executor.runner.forward.fused = False
    plain = llm.generate(prompts, params)
    seen = count_walks(monkeypatch, "blocks")
    monkeypatch.setattr(forward, "DECODE_ROWS", limit)
    llm.executor.runner.forward.fused = True
    expect_same(plain, llm.generate(prompts, params))
    assert seen["blocks_logits" if limit >= 70 else "blocks_hidden"].count(70) >= 1


def test_a_tap_sees_the_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("llama"), tmp_path / "c", seed=3)
    llm = LLM(engine(tmp_path / "c", "rptq-w8a8"), device="cpu")
    seen = count_walks(monkeypatch, "blocks")
    llm.executor.runner.forward.fused = True
    with llm.tap("layers.*") as tapped:
        llm.generate([1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert tapped["layers.0"].shape[0] >= 7
    assert seen == {"blocks_logits": [], "blocks_hidden": []}


@pytest.mark.parametrize(("group", "passes"), [(32, 0), (128, 1)])
def test_attention_ends_in_numbers(
    group: int, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as of a pass after it, which is left only where 64 columns do not fill a block."""
    save_model(tiny_config("llama"), tmp_path / "c", seed=3)
    llm = LLM(engine(tmp_path / "c", "rptq-w8a8", group), device="cpu")
    llm.executor.runner.forward.fused = True
    calls: list[int] = []
    original = blocks_walk.in_blocks

    def counted(x, steps):  # type: ignore[no-untyped-def]
        calls.append(x.shape[0])
        return original(x, steps)

    monkeypatch.setattr(blocks_walk, "in_blocks", counted)
    seen = count_walks(monkeypatch, "blocks")
    found = llm.generate(PROMPTS, PARAMS)
    steps = sum(len(walked) for walked in seen.values())
    assert steps >= 15
    assert len(calls) == passes * steps * llm.engine.model.config.num_layers
    monkeypatch.setattr(blocks_walk, "takes_steps", lambda *_: False)
    for one, other in zip(found, llm.generate(PROMPTS, PARAMS), strict=True):
        assert one.token_ids == other.token_ids
        assert [a.top for a in one.logprobs] == [b.top for b in other.logprobs]


def test_other_shapes_run_module_by_module(tmp_path: Path) -> None:
    save_model(tiny_config("gpt2"), tmp_path / "c", seed=3)
    assert not walks_in_blocks(LLM(engine(tmp_path / "c", "rptq-w8a8"), device="cpu").engine.model)
    save_model(tiny_config("llama"), tmp_path / "d" / "c", seed=3)
    assert not walks_in_blocks(LLM(tmp_path / "d" / "c", device="cpu", quant="w8a8").engine.model)
