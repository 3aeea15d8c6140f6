"""Decode steps in one call on a CPU, beside the same steps module by module."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.kernels.cpu.layer_words import Activation, CacheShape, CpuLayerShape
from ingot.kernels.cpu.layers_text import layers_text
from ingot.kernels.cpu.llvm_module import Launch, compiled, host_cpu
from ingot.kernels.cpu.panel_packing import PanelPacking
from ingot.kernels.cpu.panel_products import tiles
from ingot.layers.cpu_layers import CpuLayers
from ingot.layers.forward_batch import ForwardBatch
from ingot.quant.schemes.in_panels import InPanels
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
    "LayerNorm, GELU by tanh": ("gpt2", {}, "none"),
    "GELU": ("gpt2", {"activation_function": "gelu"}, "w8a16"),
    "ReLU": ("opt", {}, "none"),
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
    llm = LLM(engine, "cpu", runtime=RuntimeConfig(block_size=16), max_batch_size=5)
    assert layers_of(llm) is not None
    steps: list[int] = []
    normed = CpuLayers.normed

    def counted(self: CpuLayers, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        steps.extend(batch.seq_lens.tolist())
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


@pytest.mark.parametrize("engine", ["a window", "LayerNorm, GELU by tanh", "w4a16", "w8a8"], indirect=True)
def test_rows_have_the_bits_that_they_have_alone(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 to 2 requests of other lengths, on one and on three threads."""
    normed, threads = CpuLayers.normed, torch.get_num_threads()
    steps: list[int] = []

    def apart(self: CpuLayers, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        torch.set_num_threads(3)
        found = normed(self, hidden, batch).clone()
        torch.set_num_threads(1)
        alone = [
            normed(self, hidden[row : row + 1], row_of(batch, row)).clone() for row in range(len(hidden))
        ]
        steps.extend([len(hidden)] if torch.equal(found, torch.cat(alone)) else [0])
        return found

    monkeypatch.setattr(CpuLayers, "normed", apart)
    llm = LLM(engine, "cpu", runtime=RuntimeConfig(block_size=16), max_batch_size=5)
    params = [SamplingParams(max_new_tokens=2 + turn, ignore_eos=True) for turn in range(5)]
    try:
        llm.generate([PROMPT[3 * turn :] for turn in range(5)], params)
    finally:
        torch.set_num_threads(threads)
    assert steps == [5, 4, 3, 2, 1]


def row_of(batch: ForwardBatch, row: int) -> ForwardBatch:
    """A step's row alone."""
    own, encoded = slice(row, row + 1), batch.encoded
    names = ("input_ids", "positions", "rope_rows", "slot_mapping", "block_tables", "seq_lens")
    if encoded is not None:
        encoded = replace(encoded, block_tables=encoded.block_tables[own], lens=encoded.lens[own])
    return replace(batch, **{name: getattr(batch, name)[own] for name in names}, encoded=encoded)


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
    """Two requests side by side, then the survivor."""
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
        ("llama", RuntimeConfig(kv_dtype="int8")),
        ("llama", RuntimeConfig(batch_invariant=True)),
    ],
)
def test_others_are_computed_module_by_module(kind: str, runtime: RuntimeConfig, tmp_path: Path) -> None:
    save_model(tiny_config(kind), tmp_path / "tiny", seed=3)
    folder = build(tmp_path / "tiny", tmp_path / "engine", dtype="bf16", proof=False)
    assert layers_of(LLM(folder, "cpu", runtime=runtime)) is None


@pytest.mark.parametrize("engine", ["w8a16"], indirect=True)
def test_columns_in_an_order_of_their_own_are_multiplied_by_the_module(engine: Path) -> None:
    """The call gathers no inputs: it would multiply each by another's weight."""
    forward = LLM(engine, "cpu").executor.runner.forward
    assert CpuLayers.of(forward.model, forward.caches) is not None
    down = forward.model.layers[-1].mlp.down_proj
    assert isinstance(down.scheme, InPanels)
    origin = mock.Mock(wraps=down.scheme.origin, ordered=True)
    down.scheme = replace(down.scheme, origin=origin)
    assert CpuLayers.of(forward.model, forward.caches) is None


def part(call: str, mlp: Activation = "silu_gated", *, norm_bias: bool = False) -> Launch:
    """A part of a step alone, with 64 values in a row; %x, %y, %a and %b are what its arguments point to."""
    places = [f"%{name}at = getelementptr i8, ptr %args, i64 {8 * at}" for at, name in enumerate("xyab")]
    loads = [f"%{name} = load ptr, ptr %{name}at" for name in "xyab"]
    body = "\n".join((*places, *loads, f"call void @{call}", "ret void"))
    entry = f"define void @part(ptr %args, i64 %thread, i64 %threads) {{\n{body}\n}}"
    cached, packing = CacheShape(16, (1024, 256, 16)), PanelPacking("bf16")
    shape = CpuLayerShape(64, 64, 4, 4, 16, 16, 1e-5, 0.25, False, norm_bias, mlp, cached)
    text = layers_text([packing] * 4, [{1: tiles(packing)[1]}] * 4, shape, permutes=False)
    return compiled(text + entry, "part")


def test_a_power_of_e_is_close_zero_or_no_number() -> None:
    """exp16 of softmax: over its range, beyond it, and of what is not a number."""
    launch = part("exp16(ptr %x)")
    x = torch.cat((torch.linspace(-87, 88, 4092), torch.tensor([-87.5, -1e38, -torch.inf, torch.nan])))
    y = x.clone()
    for at in range(0, len(y), 16):
        launch([y[at:].data_ptr(), 0, 0, 0], 1)
    close, (below, least, lowest, nan) = y[:-4].double(), y[-4:].tolist()
    exact = x[:-4].double().exp()
    assert ((close - exact).abs() <= 2**-22 * exact).all()
    assert (below, least, lowest) == (0.0, 0.0, 0.0)
    assert math.isnan(nan)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu"])
def test_an_activation_is_close_to_the_exact_one(name: Activation) -> None:
    """Over its range, beyond it, and of what is not a number; on more threads than there are vectors, too."""
    launch = part("activate(ptr %x, ptr %y, i64 64, i64 %thread, i64 %threads)", name)
    last = torch.tensor([-3e38, -100.0, -0.0, 1e-30, 100.0, 3e38, torch.inf, torch.nan])
    x = torch.cat((torch.linspace(-12, 12, 64 * 64 - len(last)), last))
    wide = x.double()
    exact = {
        "gelu": wide * torch.special.ndtr(wide),
        "gelu_tanh": wide / (1 + (-math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3)).exp()),
        "relu": wide.clamp(min=0),
    }[name]
    for threads in (1, 3):
        y = torch.full_like(x, torch.nan)
        launch([x.data_ptr(), y.data_ptr(), 0, 0], threads)
        assert ((y[:-2] - exact[:-2]).abs() <= 2**-23 * (1 + 2 * exact[:-2].abs())).all()
        assert y[-2] == torch.inf
        assert y[-1].isnan()


@pytest.mark.parametrize("bias", [False, True], ids=["RMSNorm", "LayerNorm"])
def test_a_norm_of_rows_is_close_to_the_exact_one(bias: bool) -> None:
    """Also of rows whose mean is far from zero; on threads that share rows, and on more than rows."""
    launch = part("norm(ptr %x, ptr %a, ptr %b, ptr %y, i64 5, i64 %thread, i64 %threads)", norm_bias=bias)
    generator = torch.Generator().manual_seed(1)
    weight, shift = torch.randn(2, 64, generator=generator)
    x = torch.randn(5, 64, generator=generator) + torch.tensor([0.0, 0.0, 3.0, -30.0, 0.0])[:, None]
    x[4] *= 1e-3
    wide = x.double()
    wide = wide - wide.mean(1, keepdim=True) if bias else wide
    exact = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight + (shift if bias else 0)
    for threads in (1, 2, 3, 7):
        y = torch.full_like(x, torch.nan)
        launch([x.data_ptr(), y.data_ptr(), weight.data_ptr(), shift.data_ptr()], threads)
        assert torch.allclose(y.double(), exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_score_that_is_no_number_is_seen(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a key that was cached long ago, as a damaged cache or an overflow leaves it."""
    normed = CpuLayers.normed
    seen: list[torch.Tensor] = []

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
