"""What each kind of variant changes, and what it says of the engine on either side.

A variant that gives the original's output tells what the original has; one that gives the engine's, what the
engine runs with though its config says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ingot.config.decoder_config import RopeConfig
from ingot.measure.align.diagnosis.attention_variants import _biases, _masks, _scales, qkv_parts
from ingot.measure.align.diagnosis.layer_variants import layer_variants, sum_variants
from ingot.measure.align.diagnosis.module_variants import head_variants, mlp_variants, norm_variants
from ingot.measure.align.diagnosis.rope_variants import _scalings, _times, base_variant
from ingot.measure.align.diagnosis.stage_spec import (
    AttentionSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    RopeSpec,
    SumSpec,
    run,
)
from ingot.measure.align.diagnosis.variant import Variant
from ingot.reference.plain_layer import NormSpec

DIM, BASE = 8, 1e4
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
Found = Variant[Any]


def only(variants: Any, change: str) -> Found:
    (one,) = [variant for variant in variants if variant.change == change]
    return one


def said(variant: Found) -> tuple[str, str]:
    return variant.of_original.text, variant.of_engine.text


def norm(**values: Any) -> NormSpec:
    weight, bias = torch.tensor([1.5] * 6), torch.tensor([0.5] * 6)
    return replace(NormSpec("n", weight, bias, 1e-6, "layer_norm"), **values)


def test_an_epsilon() -> None:
    one = only(norm_variants(norm()), "epsilon 0.001")
    assert said(one) == (
        "the epsilon of n is 1e-06, the original's is 0.001",
        "n runs with epsilon 0.001, the config says 1e-06",
    )
    assert one.spec == replace(norm(), eps=1e-3, weight=one.spec.weight, bias=one.spec.bias)
    tried = [v.spec.eps for v in norm_variants(norm()) if v.of_engine.culprit == "norm_eps"]
    assert sorted(tried) == [0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2]


def test_another_kind_of_norm_and_none() -> None:
    """Of the same bias and without one."""
    kinds = [one for one in norm_variants(norm()) if one.of_engine.culprit == "norm_kind"]
    assert [(one.spec.kind, one.spec.bias is None) for one in kinds] == [
        ("rms_norm", False),
        ("rms_norm", True),
    ]
    assert said(kinds[0]) == (
        "n is LayerNorm, the original's is RMSNorm",
        "n runs as RMSNorm, the config says LayerNorm",
    )
    wanted = X / (X.square().mean(-1, keepdim=True) + 1e-6).sqrt() * 1.5
    torch.testing.assert_close(run(kinds[1].spec, X), wanted)
    torch.testing.assert_close(run(kinds[0].spec, X), wanted + 0.5)
    none = only(norm_variants(norm()), "n left out")
    assert torch.equal(run(none.spec, X), X)
    assert said(none) == ("n stands where the original has no norm", "n is not applied")
    ones = only(norm_variants(norm()), "ones for its weight")
    centred = X - X.mean(-1, keepdim=True)
    plain = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(run(ones.spec, X), plain + 0.5)
    assert said(ones) == ("n has a weight, the original's is all ones", "the weight of n is not applied")


@pytest.mark.parametrize(
    ("change", "factor", "culprits"),
    [
        ("the bias n.bias left out", 0.0, ("norm_bias_extra", "norm_bias_missing")),
        ("half of the bias n.bias", 0.5, ("norm_bias_doubled", "norm_bias_halved")),
        ("the bias n.bias twice", 2.0, ("norm_bias_halved", "norm_bias_doubled")),
    ],
)
def test_a_bias(change: str, factor: float, culprits: tuple[str, str]) -> None:
    """Left out, it gives the original's output where the original has none."""
    one = only(norm_variants(norm()), change)
    assert torch.equal(one.spec.bias, factor * torch.tensor([0.5] * 6))
    assert (one.of_original.culprit, one.of_engine.culprit) == culprits
    words = {
        "extra": "not in the original",
        "missing": "missing",
        "doubled": "added twice",
        "halved": "half of",
    }
    for culprit, text in zip(culprits, said(one), strict=True):
        assert words[culprit.rpartition("_")[2]] in text


def attention(**values: Any) -> AttentionSpec:
    """Of 4 query heads and 2 key heads with 8 channels."""
    whole: dict[str, Any] = {
        "name": "a", "query_norm": None, "key_norm": None, "heads": 4, "kv_heads": 2, "head_dim": DIM,
        "positions": torch.arange(9), "scale": 0.25, "rope": None, "qkv": torch.zeros(64, 16),
        "qkv_bias": torch.arange(1.0, 65.0), "output": torch.zeros(16, 32), "output_bias": None,
    }  # fmt: skip
    return AttentionSpec(**whole | values)


def test_biases_of_queries_keys_and_values() -> None:
    assert qkv_parts(attention()) == {"query": slice(0, 32), "key": slice(32, 48), "value": slice(48, 64)}
    bias = attention().qkv_bias
    assert bias is not None
    for part, first, last in (("query", 0, 32), ("key", 32, 48), ("value", 48, 64)):
        one = only(_biases(attention()), f"the {part} bias a.qkv_proj.bias left out")
        wanted = bias.clone()
        wanted[first:last] = 0
        assert torch.equal(one.spec.qkv_bias, wanted)
        assert said(one)[1] == f"the {part} bias a.qkv_proj.bias is missing"


def test_masks_and_windows() -> None:
    spec = attention(window=3)
    by = {one.change: one for one in _masks(spec)}
    none = by["no mask: every token sees every other"]
    assert (none.spec.causal, none.spec.window) == (False, 0)
    assert said(none) == (
        "the mask of a is causal where the original's is not",
        "the mask of a is missing: tokens see those after them",
    )
    assert by["a mask that lets a token see the next one"].spec.ahead == 1
    assert by["a mask that hides a token from itself"].spec.ahead == -1
    assert said(by["a sliding window of 5 tokens"]) == (
        "the sliding window of a is 3 tokens, the original's is 5 tokens",
        "a runs with a sliding window of 5 tokens, the config says 3 tokens",
    )
    assert said(by["no sliding window"])[1] == "a runs with no sliding window, the config says 3 tokens"
    assert by["no sliding window"].spec.window == 0
    assert {one.spec.window for one in by.values() if one.of_engine.culprit == "window"} == {
        0,
        1,
        2,
        4,
        5,
        6,
        7,
        8,
    }


def test_log_n_scaling() -> None:
    one = only(_scales(attention(logn_length=2048), 0), "log-n scaling off")
    assert said(one) == (
        "log-n scaling of queries is with length 2048, the original's is off",
        "log-n scaling of queries runs off, the config says with length 2048",
    )
    assert one.spec.logn_length == 0


def rope_of(config: RopeConfig) -> tuple[AttentionSpec, RopeSpec]:
    positions = torch.arange(9)
    rope = RopeSpec(BASE ** -(torch.arange(0, DIM, 2) / DIM), positions, positions, config.attention_factor)
    return attention(rope=rope), rope


def test_a_rotary_base_and_how_often_it_turns() -> None:
    config = RopeConfig(DIM, BASE)
    spec, rope = rope_of(config)
    one = base_variant(spec, rope, config, 5e5)
    assert one.spec.rope is not None
    torch.testing.assert_close(one.spec.rope.frequencies, 5e5 ** -(torch.arange(0, DIM, 2) / DIM))
    assert said(one) == (
        "the RoPE base is 10000, the original's is 500000",
        "RoPE runs with base 500000, though the config says 10000",
    )
    turned = {v.change: (v.spec.rope.query_turns, v.spec.rope.key_turns) for v in _times(spec, rope)}  # type: ignore[union-attr]
    assert turned == {
        "RoPE applied twice to queries and keys": (2, 2), "RoPE not applied to queries and keys": (0, 0),
        "RoPE applied twice to queries": (2, 1), "RoPE not applied to queries": (0, 1),
        "RoPE applied twice to keys": (1, 2), "RoPE not applied to keys": (1, 0),
    }  # fmt: skip
    twice = only(_times(spec, rope), "RoPE applied twice to keys")
    assert (twice.of_original.culprit, twice.of_engine.culprit) == ("rope_once", "rope_twice")


def test_scalings_of_rotary_positions() -> None:
    """The config's own length is tried beside the usual ones; a scaled config is tried without it."""
    config = RopeConfig(DIM, BASE, scaling="yarn", factor=3.0, original_max=48, attention_factor=1.2)
    spec, rope = rope_of(config)
    tried = list(_scalings(spec, rope, config))
    linear = only(tried, "RoPE scaling linear (factor 4)")
    assert linear.spec.rope is not None
    torch.testing.assert_close(linear.spec.rope.frequencies, rope.frequencies / 4)
    assert (linear.spec.rope.factor, rope.factor) == (1.0, 1.2)
    here = "yarn (factor 3, original length 48, magnitude 1.2)"
    assert said(linear) == (
        f"RoPE scaling is {here}, the original's is linear (factor 4)",
        f"RoPE runs with scaling linear (factor 4), though the config says {here}",
    )
    none = only(tried, "RoPE scaling none")
    assert none.spec.rope is not None
    torch.testing.assert_close(none.spec.rope.frequencies, rope.frequencies)
    assert none.spec.rope.factor == 1.0
    named = [one.change for one in tried]
    for factor in (2, 4, 8, 16, 32):
        for length in (48, 2048, 4096, 8192, 32768):
            for kind in ("llama3", "yarn"):
                assert f"RoPE scaling {kind} (factor {factor}, original length {length})" in named
    assert len(tried) == 2 + 5 * (1 + 2 * 5)


def mlp(**values: Any) -> MlpSpec:
    up, gate = torch.arange(12.0).view(2, 6), torch.arange(20.0, 32.0).view(2, 6)
    whole: dict[str, Any] = {
        "name": "m", "activation": "silu", "on": "gate", "gate": gate, "up": up, "up_bias": None,
        "down": torch.ones(6, 2), "down_bias": None,
    }  # fmt: skip
    return MlpSpec(**whole | values)


def test_activations_and_branches() -> None:
    one = only(mlp_variants(mlp()), "gelu")
    assert (one.spec.activation, one.spec.on) == ("gelu", "gate")
    assert said(one) == (
        "the activation of m is silu, the original has gelu",
        "m runs with gelu, the config says silu",
    )
    tried = [v.spec.activation for v in mlp_variants(mlp()) if v.of_engine.culprit == "activation"]
    assert sorted(tried) == ["gelu", "gelu_tanh", "none", "relu"]
    swapped = only(mlp_variants(mlp()), "the halves of m.gate_up_proj exchanged")
    assert torch.equal(swapped.spec.gate, mlp().up)
    assert torch.equal(swapped.spec.up, mlp().gate)
    assert (swapped.of_original.culprit, swapped.of_engine.culprit) == (
        "gate_up_swapped",
        "activation_branch",
    )
    turns = only(mlp_variants(mlp()), "the rows of m.gate_up_proj taken as gate and up in turn, 4 in all")
    assert turns.spec.gate[:, 0].tolist() == [20, 0]
    assert turns.spec.up[:, 0].tolist() == [26, 6]
    assert {v.spec.on for v in mlp_variants(mlp()) if v.of_original.culprit == "activation_branch"} == {
        "both",
        "product",
    }


def test_a_layer_has_its_parts_variants_each_in_its_part() -> None:
    config: Any = type("Config", (), {"num_layers": 2, "rope": None})
    names = {"input_norm": "first", "post_norm": "second"}
    norms = {field: norm(name=name) for field, name in names.items()}
    layer = LayerSpec(name="layers.0", attention=attention(), mlp=mlp(), **norms)
    by_part: dict[str, list[Found]] = {}
    for one in layer_variants(layer, config, 9, 0):
        changed = [f for f in ("attention", "mlp", *names) if getattr(one.spec, f) is not getattr(layer, f)]
        by_part.setdefault(" ".join(changed), []).append(one)
    assert set(by_part) == {"", "attention", "mlp", *names, "input_norm post_norm"}
    for part in names:
        wanted = list(norm_variants(norms[part]))
        assert [one.change for one in by_part[part]] == [one.change for one in wanted]
        assert [said(one) for one in by_part[part]] == [said(one) for one in wanted]
        assert [getattr(one.spec, part).name for one in by_part[part]] == [names[part]] * len(wanted)
    assert [one.change for one in by_part["mlp"]] == [one.change for one in mlp_variants(mlp())]
    both = by_part["input_norm post_norm"]
    assert [(one.spec.input_norm.eps, one.spec.input_norm.kind) for one in both] == [
        (one.spec.post_norm.eps, one.spec.post_norm.kind) for one in both
    ]
    assert [(one.spec.input_norm.name, one.spec.post_norm.name) for one in both] == [
        ("first", "second")
    ] * len(both)


def test_the_head() -> None:
    spec, embedding = HeadSpec("lm_head", torch.ones(5, 6), None), torch.zeros(5, 6)
    config: Any = type("Config", (), {"hidden_size": 6})
    one = only(head_variants(spec, embedding, config), "the embedding as the head's weight")
    assert one.spec.weight is embedding
    assert (one.of_original.culprit, one.of_engine.culprit) == ("head_untied", "head_tied")
    scaled = [v for v in head_variants(spec, embedding, config) if v.of_original.culprit == "logit_scale"]
    assert all("lack the original's factor" in said(v)[0] and "have an extra" in said(v)[1] for v in scaled)


@pytest.mark.parametrize("of", ["attention", "mlp"])
def test_sums(of: Any) -> None:
    spec = SumSpec("layers.0", of, torch.full((2, 3), 10.0))
    whose, branch = {"attention": "attention's", "mlp": "the MLP's"}[of], torch.ones(2, 3)
    tried = list(sum_variants(spec))
    values = {
        float(run(one.spec, branch)[0, 0]): (one.of_original.culprit, one.of_engine.culprit) for one in tried
    }
    half = math.sqrt(0.5)
    scale = ("residual_scale",) * 2
    assert {round(key, 4): value for key, value in values.items()} == {
        1.0: ("residual_extra", "residual_missing"),
        10.0: ("branch_extra", "branch_missing"),
        **{round(10 + by, 4): scale for by in (0.5, 2.0, half, 1 / half)},
        **{round(10 * by + 1, 4): scale for by in (0.5, 2.0, half, 1 / half)},
    }
    assert whose in tried[0].change
    assert whose in said(tried[1])[1]
