"""The ledger's formulas against what real, tiny models hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.config.build import BuildConfig
from ingot.config.model import DecoderConfig, RopeConfig
from ingot.config.plan import KernelPlan
from ingot.config.runtime import RuntimeConfig
from ingot.engine.memory_sizes import activation_bytes
from ingot.engine.random_weights import random_decoder
from ingot.layers.decoder import Decoder
from ingot.runtime.setup import largest_step, run_step
from tests.unit.tracking import AllocationTracker

CPU = torch.device("cpu")


def shape(architecture: str = "llama", **changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 4096,
        "rope": RopeConfig(dim=8),
    }
    return DecoderConfig(architecture=architecture, **(sizes | changes))


GPT2 = {"rope": None, "norm": "layer_norm", "mlp": "gelu_tanh", "num_kv_heads": 4, "intermediate_size": 128}
BIASED = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
SHAPES = {
    "llama": shape(),
    "one layer": shape(num_layers=1),
    "two layers": shape(num_layers=2),
    "MHA": shape(num_kv_heads=4),
    "qwen": shape("qwen", num_kv_heads=4, qkv_bias=True, logn_length=64),
    "qwen2": shape("qwen2", qkv_bias=True, tie_word_embeddings=True),
    "qwen3, wide heads": shape("qwen3", qk_norm=True, head_dim=32, rope=RopeConfig(dim=32)),
    "gpt2": shape("gpt2", **GPT2, **BIASED, tie_word_embeddings=True),
    "wide vocabulary": shape(vocab_size=4001),
    "narrow MLP": shape(intermediate_size=16),
    "small": shape(hidden_size=256, intermediate_size=688, num_heads=8, num_kv_heads=8, head_dim=32,
                   rope=RopeConfig(dim=32), vocab_size=1009),
}  # fmt: skip


def decoder(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    build = BuildConfig("fp32", 8, 1024)
    return random_decoder(config, build, KernelPlan(), CPU, dtype)


def tracked(config: DecoderConfig, dtype: torch.dtype, runtime: RuntimeConfig) -> int:
    model = decoder(config, dtype)
    batch, caches = largest_step(model, CPU, dtype, 8, runtime)
    with AllocationTracker() as tracker:
        run_step(model, batch, caches)
    return tracker.peak


def as_launchers_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put, in place of the kernels' twins, what their launchers allocate: results and nothing else."""

    def norm(x: Any, *rest: Any, tiles: Any) -> Any:
        residual = rest[-1]
        return torch.empty_like(x), x if residual is None else torch.empty_like(x)

    def place(qkv: Any, *rest: Any, **_: Any) -> Any:
        heads, size = rest[6], rest[8]
        return torch.empty(len(qkv), heads, size, dtype=qkv.dtype)

    monkeypatch.setattr("ingot.layers.norm.rms_norm", norm)
    monkeypatch.setattr("ingot.layers.norm.layer_norm", norm)
    monkeypatch.setattr("ingot.layers.attention.rope_kv_write", place)
    monkeypatch.setattr("ingot.layers.attention.prefill_attention", lambda *_, out, **__: out)
    monkeypatch.setattr(
        "ingot.layers.mlp.silu_mul", lambda x, tiles: torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype)
    )


@pytest.mark.parametrize("budget", [64, 600])
@pytest.mark.parametrize("name", SHAPES)
class TestActivations:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_of_a_gpu(
        self, name: str, budget: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        as_launchers_allocate(monkeypatch)
        runtime = RuntimeConfig(token_budget=budget)
        predicted = activation_bytes(SHAPES[name], dtype, runtime, 8)
        assert predicted == pytest.approx(tracked(SHAPES[name], dtype, runtime), rel=0.05)

    def test_of_the_twins(self, name: str, budget: int) -> None:
        runtime = RuntimeConfig(token_budget=budget)
        predicted = activation_bytes(SHAPES[name], torch.float32, runtime, 8, kernels=False)
        assert predicted == pytest.approx(tracked(SHAPES[name], torch.float32, runtime), rel=0.05)
