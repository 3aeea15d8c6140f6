"""The ledger's formulas against what real, tiny models hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ingot.building.random_weights import random_decoder
from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import most_tokens
from ingot.kernels.cache.cache_scales import CacheScales
from ingot.layers.decoder import Decoder
from ingot.layers.linear import linears
from ingot.memory import memory_sizes
from ingot.memory.ledger import MemorySetting
from ingot.memory.memory_fixes import fits_by_card
from ingot.memory.memory_sizes import activation_bytes, kv_bytes_per_token, weight_bytes
from ingot.models.architecture import Architecture
from ingot.runtime.setup import largest_step, measured_activations, run_step
from ingot.runtime.step.chosen_products import Forward
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
GEMMA2 = {
    "mlp": "gelu_tanh_gated",
    "wide_norms": True,
    "post_norms": True,
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
    "embedding_scale": 5.7,
    "sliding_window": 100,
    "full_layers": (1,),
}
GEMMA3 = GEMMA2 | {"attention_softcap": 0.0, "logit_softcap": 0.0, "qk_norm": True}
GEMMA3 |= {"local_rope": RopeConfig(dim=8, theta=100.0)}
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
    "gemma2": shape("gemma2", **GEMMA2, tie_word_embeddings=True),
    "window": shape("mistral", sliding_window=100),
    "gemma3": shape("gemma3", **GEMMA3, tie_word_embeddings=True),
    "wide vocabulary": shape(vocab_size=4001),
    "narrow MLP": shape(intermediate_size=16),
    "small": shape(hidden_size=256, intermediate_size=688, num_heads=8, num_kv_heads=8, head_dim=32,
                   rope=RopeConfig(dim=32), vocab_size=1009),
}  # fmt: skip


def decoder(config: DecoderConfig, dtype: torch.dtype, quant: QuantConfig | None = None) -> Decoder:
    build = BuildConfig("fp32", 8, 1024)
    return random_decoder(config, build, KernelPlan(), CPU, dtype, quant=quant)


def tracked(
    config: DecoderConfig, dtype: torch.dtype, runtime: RuntimeConfig, quant: QuantConfig | None = None
) -> int:
    model = decoder(config, dtype, quant)
    batch, caches = largest_step(model, CPU, dtype, 8, runtime)
    with AllocationTracker() as tracker:
        run_step(model, batch, caches)
    return tracker.peak


def as_launchers_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put, in place of the kernels' twins, what their launchers allocate: results and nothing else."""

    def norm(x: Any, *rest: Any) -> Any:
        residual, _, _ = rest[-3:]  # tiles, ending
        return torch.empty_like(x), x if residual is None else torch.empty_like(x)

    def placed(qkv: Any, place: Any, *_: Any) -> Any:
        return torch.empty(len(qkv), place.heads.num_heads, place.heads.head_dim, dtype=qkv.dtype)

    monkeypatch.setattr("ingot.layers.norm.rms_norm", norm)
    monkeypatch.setattr("ingot.layers.norm.layer_norm", norm)
    monkeypatch.setattr("ingot.layers.attention.rope_kv_write", placed)
    monkeypatch.setattr("ingot.layers.attention.prefill_attention", lambda *_, output, **__: output.out)
    monkeypatch.setattr(
        "ingot.layers.mlp.silu_mul", lambda x, **_: torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype)
    )


@pytest.mark.parametrize("budget", [64, 600])
@pytest.mark.parametrize("name", SHAPES)
class TestActivations:
    @pytest.mark.grid(1)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_of_a_gpu(
        self, name: str, budget: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        as_launchers_allocate(monkeypatch)
        runtime = RuntimeConfig(token_budget=budget)
        predicted = activation_bytes(SHAPES[name], dtype, runtime, 8)
        assert predicted == pytest.approx(tracked(SHAPES[name], dtype, runtime), rel=0.05)

    @pytest.mark.grid(1)
    def test_layers_that_are_alike_are_measured_once(
        self, name: str, budget: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The largest step takes to the byte what a step of all layers does."""
        as_launchers_allocate(monkeypatch)
        runtime = RuntimeConfig(token_budget=budget)
        model = decoder(SHAPES[name], torch.float16)
        batch, caches = largest_step(model, CPU, torch.float16, 8, runtime)
        with AllocationTracker() as whole:
            Forward(model, caches, fused=False)(batch).float()
        assert tracked(SHAPES[name], torch.float16, runtime) == whole.peak

    @pytest.mark.grid(1)
    def test_of_the_references(self, name: str, budget: int) -> None:
        runtime = RuntimeConfig(token_budget=budget)
        predicted = activation_bytes(SHAPES[name], torch.float32, runtime, 8, kernels=False)
        assert predicted == pytest.approx(tracked(SHAPES[name], torch.float32, runtime), rel=0.05)


def other_window(layer: Any) -> None:
    layer.self_attn.scoring = layer.self_attn.scoring._replace(window=64)


def other_softcap(layer: Any) -> None:
    layer.self_attn.scoring = layer.self_attn.scoring._replace(softcap=30.0)


def other_class(layer: Any) -> None:
    layer.self_attn.__class__ = type("OtherAttention", (type(layer.self_attn),), {})


def other_scheme(layer: Any) -> None:
    scheme = layer.mlp.down_proj.scheme
    layer.mlp.down_proj.scheme = replace(scheme, per_tensor=True)


def other_buffer(layer: Any) -> None:
    layer.register_buffer("sinks", torch.zeros(4))


CHANGES = [other_window, other_softcap, other_class, other_scheme, other_buffer, "rotary"]


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_differ_are_two_kinds(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 3 of 6 is of its own kind, and the end of layer 2 is another's."""
    model = decoder(shape(num_layers=6), torch.float16, QuantConfig("w8a8"))
    _, caches = largest_step(model, CPU, torch.float16, 8, RuntimeConfig(token_budget=64))
    assert Forward(model, caches, fused=False)._unlike_layers == [0, 5]
    if change == "rotary":
        tables = [torch.zeros(2), torch.zeros(2)]
        monkeypatch.setattr(model, "rope_table", lambda index: tables[index == 3])
    else:
        change(model.layers[3])
    assert Forward(model, caches, fused=False)._unlike_layers == [0, 2, 3, 5]


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
@pytest.mark.parametrize("name", ["llama", "small", "gpt2"])
def test_widened_weights_are_counted(name: str, scheme: str) -> None:
    """At most: the largest weight and the largest phase need not meet."""
    quant, runtime = QuantConfig(scheme), RuntimeConfig(token_budget=64)
    plain = tracked(SHAPES[name], torch.float32, runtime)
    found = tracked(SHAPES[name], torch.float32, runtime, quant)
    predicted = activation_bytes(SHAPES[name], torch.float32, runtime, 8, kernels=False, quant=quant)
    most = max(m.weight.numel() for m in linears(decoder(SHAPES[name], torch.float32)).values())
    assert plain <= found <= predicted <= plain + 8 * most


@pytest.mark.parametrize("budget", [64, 600])
@pytest.mark.parametrize("name", ["llama", "small", "gpt2"])
def test_inputs_in_8_bits_are_counted(name: str, budget: int) -> None:
    """At most: the widest product and the largest phase need not meet."""
    quant, runtime = QuantConfig("w8a8"), RuntimeConfig(token_budget=budget)
    config = SHAPES[name]
    plain, found = (tracked(config, torch.float32, runtime, q) for q in (None, quant))
    predicted = activation_bytes(config, torch.float32, runtime, 8, kernels=False, quant=quant)
    assert plain <= found <= predicted <= 4 * found
    on_gpu = [activation_bytes(config, torch.float16, runtime, 8, quant=q) for q in (QuantConfig(), quant)]
    widest = max(config.intermediate_size, config.q_size, config.hidden_size)
    most = most_tokens(budget, 8) * (widest + 4 * config.num_heads)
    assert 0 < on_gpu[1] - on_gpu[0] <= most


@pytest.mark.parametrize("budget", [64, 600])
@pytest.mark.parametrize("name", ["llama", "small"])
def test_a_weight_that_becomes_int8_is_counted(name: str, budget: int) -> None:
    """On a GPU the largest weight's byte a value; on a CPU also what makes it."""
    quant, runtime = QuantConfig("w4a8"), RuntimeConfig(token_budget=budget)
    config = SHAPES[name]
    found = tracked(config, torch.float32, runtime, quant)
    predicted = activation_bytes(config, torch.float32, runtime, 8, kernels=False, quant=quant)
    assert found <= predicted <= 4 * found
    quants = (QuantConfig("w8a8"), quant)
    wide, both = (activation_bytes(config, torch.float16, runtime, 8, quant=q) for q in quants)
    assert 0 < both - wide <= 2 * config.intermediate_size * -(-config.hidden_size // 128) * 128


def test_a_scheme_computes_its_own_bytes() -> None:
    config = shape()
    plain = weight_bytes(config, QuantConfig(), torch.float16)
    packed = weight_bytes(config, QuantConfig("w8a16"), torch.float16)
    words = 64 * 2  # of a row: 32 or 48 columns padded to a chunk of 128
    inner, hidden = config.intermediate_size, config.hidden_size
    assert packed["mlp"] == config.num_layers * (2 * inner + hidden) * (words + 2)
    assert [packed[kind] for kind in ("embedding", "norms", "head")] == [
        plain[kind] for kind in ("embedding", "norms", "head")
    ]


def test_a_tied_head_is_counted_once() -> None:
    tied, own = (shape(tie_word_embeddings=tied) for tied in (True, False))
    found, more = (weight_bytes(config, QuantConfig(), torch.float16) for config in (tied, own))
    assert (found["head"], more["head"]) == (0, 97 * 32 * 2)
    assert {k: v for k, v in found.items() if k != "head"} == {k: v for k, v in more.items() if k != "head"}


def test_modules_are_made_once_a_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counted(*parts: Any) -> Any:
        made.append(parts)
        return empty_model(*parts)

    empty_model = Architecture.empty_model
    monkeypatch.setattr(Architecture, "empty_model", counted)
    memory_sizes._counted.cache_clear()
    rows = list(fits_by_card(MemorySetting(shape(), "fp16", 8, 256)))
    assert len(made) == len({(row.dtype, row.quant) for row in rows}) > 2


def test_patterns_in_another_order_are_another_model() -> None:
    patterns = [("layers.0.*", "w8a16"), ("*.down_proj", "none")]
    one, other = (QuantConfig(layers=dict(order)) for order in (patterns, patterns[::-1]))
    assert one == other
    found, less = (weight_bytes(SHAPES["small"], quant, torch.float16)["mlp"] for quant in (one, other))
    assert less < found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_activations_on_a_gpu(dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_heads": 16, "num_kv_heads": 4}
    config = shape(**sizes, head_dim=64, rope=RopeConfig(dim=64), vocab_size=8192)
    cuda, runtime = torch.device("cuda", 0), RuntimeConfig()
    model = random_decoder(config, BuildConfig("fp32", 8, 4096), KernelPlan(), cuda, dtype)
    measured_activations(model, cuda, dtype, 8, runtime)  # the matrix library takes its workspace
    found = measured_activations(model, cuda, dtype, 8, runtime)
    assert activation_bytes(config, dtype, runtime, 8) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_a_token_s_keys_and_values_are_counted_with_their_scales(dtype: torch.dtype) -> None:
    config, blocks, block_size = shape(), 5, 16
    cache = torch.empty(blocks, config.num_kv_heads, block_size, config.head_dim, dtype=dtype)
    tensors = [cache, cache]
    if dtype.itemsize == 1:
        tensors += CacheScales.zeros(blocks, config.num_kv_heads, block_size, CPU).tensors
    held = config.num_layers * sum(tensor.nbytes for tensor in tensors)
    assert kv_bytes_per_token(config, dtype) * blocks * block_size == held
