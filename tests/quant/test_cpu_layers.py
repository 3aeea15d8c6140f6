"""Decode steps of one token in one call on a CPU, beside the same steps module by module."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.kernels.cpu.layers_text import LayerShape, layers_text
from ingot.kernels.cpu.llvm_module import compiled, host_cpu
from ingot.kernels.cpu.panel_products import tiles
from ingot.kernels.cpu.product_text import Packing
from ingot.layers.cpu_layers import CpuLayers
from tests.tiny_models import save_model, tiny_config

pytestmark = pytest.mark.usefixtures("cpu_kernels")
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.0, logprobs=5)
PROMPT = [3 + 5 * i % 90 for i in range(29)]
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "none"),
    "biases, one group": ("qwen2", {"num_key_value_heads": 1}, "none"),
    "norms of heads": ("qwen3", {}, "none"),
    "a window": ("mistral", {"sliding_window": 7}, "none"),
    "wide heads": ("llama", {"head_dim": 16, "num_key_value_heads": 4}, "none"),
    "w8a16": ("llama", {}, "w8a16"),
    "w4a16": ("llama", WIDE, "w4a16"),
}
ROUNDED: dict[str, tuple[str, dict[str, Any], str]] = {
    "w8a8": ("llama", WIDE, "w8a8"),
    "w4a8": ("llama", WIDE, "w4a8"),
}


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind, changes, scheme = (KINDS | ROUNDED)[request.param]
    save_model(tiny_config(kind, **changes), tmp_path / "tiny", seed=3)
    quant = QuantConfig(scheme, group=64) if scheme.startswith("w4") else QuantConfig(scheme)
    return build(tmp_path / "tiny", tmp_path / "engine", quant=quant, dtype="bf16", proof=False)


def layers_of(llm: LLM) -> CpuLayers | None:
    return llm.executor.runner.forward._cpu_layers


def logprobs(llm: LLM, prompt: list[int], params: SamplingParams = PARAMS) -> tuple[list[int], torch.Tensor]:
    answer = llm.generate([prompt], params)[0].answers[0]
    assert answer.logprobs is not None
    return list(answer.token_ids), torch.tensor([one.logprob for one in answer.logprobs])


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_steps_are_those_of_the_modules(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across several blocks of the cache, which other requests have mixed up."""
    llm = LLM(engine, "cpu", runtime=RuntimeConfig(block_size=16), max_batch_size=4)
    assert layers_of(llm) is not None
    steps: list[int] = []
    normed = CpuLayers.normed

    def counted(self: CpuLayers, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        steps.append(int(batch.seq_lens))
        return normed(self, hidden, batch)

    monkeypatch.setattr(CpuLayers, "normed", counted)
    llm.generate([[7] * 20, [9] * 5, [11] * 40], SamplingParams(max_new_tokens=5, ignore_eos=True))
    steps.clear()
    ids, found = logprobs(llm, PROMPT)
    assert steps == list(range(len(PROMPT) + 1, len(PROMPT) + 24))
    plain = LLM(engine, "cpu", runtime=RuntimeConfig(fused_decode=False))
    assert layers_of(plain) is None
    expected_ids, expected = logprobs(plain, PROMPT)
    assert ids == expected_ids
    assert torch.allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("engine", ROUNDED, indirect=True)
def test_steps_of_8_bits_are_those_of_the_modules(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for values in the middle between two of 8 bits, which few steps have."""
    cpu = host_cpu()
    if cpu is None or not cpu.vnni:
        pytest.skip("this processor has no products of int8 that we use")
    llm = LLM(engine, "cpu", runtime=RuntimeConfig(block_size=16))
    normed, forward = CpuLayers.normed, llm.executor.runner.forward
    differences: list[float] = []

    def beside(self: CpuLayers, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        _, expected = forward.with_hidden(batch)  # into the same slot of the cache
        found = normed(self, hidden, batch)
        differences.append(float((found - expected).abs().max()))
        return found

    monkeypatch.setattr(CpuLayers, "normed", beside)
    for turn in range(3):
        logprobs(llm, [token + turn for token in PROMPT])
    assert len(differences) == 3 * 23
    assert max(differences) < 0.5
    assert sorted(differences)[60] < 2e-5


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_blocks_out_of_order_and_later_requests(engine: Path) -> None:
    """Two requests side by side are computed module by module, the survivor in one call."""
    llm = LLM(engine, "cpu", runtime=RuntimeConfig(block_size=16), max_batch_size=2)
    long = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=0.0)
    short = SamplingParams(max_new_tokens=9, ignore_eos=True, temperature=0.0)
    both = llm.generate([PROMPT, PROMPT[::-1]], [long, short])
    alone = [llm.generate([PROMPT], long)[0], llm.generate([PROMPT[::-1]], short)[0]]
    assert [list(one.answers[0].token_ids) for one in both] == [
        list(one.answers[0].token_ids) for one in alone
    ]


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_on_any_threads_a_step_has_the_same_bits(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on more threads than there are key-value heads."""
    normed, threads = CpuLayers.normed, torch.get_num_threads()
    steps = []

    def on_each(self: CpuLayers, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(normed(self, hidden, batch).clone())
        torch.set_num_threads(threads)
        steps.append(all(torch.equal(found[0], other) for other in found[1:]))
        return found[0]

    monkeypatch.setattr(CpuLayers, "normed", on_each)
    try:
        logprobs(LLM(engine, "cpu"), PROMPT)
    finally:
        torch.set_num_threads(threads)
    assert len(steps) == 23
    assert all(steps)


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_step_begins_its_barriers_anew(engine: Path) -> None:
    """Whatever an earlier one of other threads has counted."""
    llm = LLM(engine, "cpu")
    layers = layers_of(llm)
    assert layers is not None
    logprobs(llm, PROMPT)
    counted = int(layers._met[0])
    assert counted > 0
    layers._met[0] = 5
    logprobs(llm, PROMPT)
    assert int(layers._met[0]) == counted


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_tap_sees_every_module(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(engine, "cpu")
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, temperature=0.0)
    expected = llm.generate([PROMPT], params)[0].answers[0].token_ids
    monkeypatch.setattr(CpuLayers, "normed", None)
    with llm.tap("layers.1.mlp.down_proj") as tap:
        assert llm.generate([PROMPT], params)[0].answers[0].token_ids == expected
    assert len(tap) > 0


@pytest.mark.parametrize(
    ("kind", "runtime"),
    [
        ("gemma2", RuntimeConfig()),
        ("gpt2", RuntimeConfig()),
        ("llama", RuntimeConfig(kv_dtype="int8")),
        ("llama", RuntimeConfig(batch_invariant=True)),
    ],
)
def test_others_are_computed_module_by_module(kind: str, runtime: RuntimeConfig, tmp_path: Path) -> None:
    save_model(tiny_config(kind), tmp_path / "tiny", seed=3)
    folder = build(tmp_path / "tiny", tmp_path / "engine", dtype="bf16", proof=False)
    assert layers_of(LLM(folder, "cpu", runtime=runtime)) is None


def test_a_power_of_e_is_close_zero_or_no_number() -> None:
    """exp16 of softmax: over its range, beyond it, and of what is not a number."""
    shape = LayerShape(64, 64, 4, 4, 16, 16, 1e-5, 0.25, False, 16, (1024, 256, 16))
    entry = """define void @only_exp(ptr %args, i64 %thread, i64 %threads) {
      %x = load ptr, ptr %args
      call void @exp16(ptr %x)
      ret void
    }"""
    packing = Packing("bf16")
    text = layers_text([packing] * 4, [tiles(packing)] * 4, shape, permutes=False)
    launch = compiled(text + entry, "only_exp")
    x = torch.cat((torch.linspace(-87, 88, 4092), torch.tensor([-87.5, -1e38, -torch.inf, torch.nan])))
    y = x.clone()
    for at in range(0, len(y), 16):
        launch([y[at:].data_ptr()], 1)
    close, (below, least, lowest, nan) = y[:-4].double(), y[-4:].tolist()
    exact = x[:-4].double().exp()
    assert ((close - exact).abs() <= 2**-22 * exact).all()
    assert (below, least, lowest) == (0.0, 0.0, 0.0)
    assert math.isnan(nan)


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_score_that_is_no_number_is_seen(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a key that was cached long ago, as a damaged cache or an overflow leaves it."""
    normed, seen = CpuLayers.normed, []

    def damaged(self: CpuLayers, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        slot = int(batch.block_tables[0, 0]) * 16 + 3
        llm.executor.runner.caches[0].keys[slot // 16, 0, slot % 16, 0] = torch.nan
        seen.append(normed(self, hidden, batch).clone())
        return torch.zeros_like(seen[-1])

    llm = LLM(engine, "cpu", runtime=RuntimeConfig(block_size=16))
    monkeypatch.setattr(CpuLayers, "normed", damaged)
    llm.generate([PROMPT], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert len(seen) == 1
    assert seen[0].isnan().all()
