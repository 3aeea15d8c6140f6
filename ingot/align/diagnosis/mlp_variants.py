"""What ports get wrong about the feed-forward.

Owns the variants of one MlpSpec. Knows nothing of the layer around it.

    for variant in mlp_variants(mlp): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ingot.align.diagnosis.spec import MlpSpec
from ingot.align.diagnosis.variant import Claim, Variant, bias_variants, mirrored, transposed_variants
from ingot.layers.checking import Activation

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "none")


def mlp_variants(spec: MlpSpec) -> Iterator[Variant[MlpSpec]]:
    """Branches exchanged, other activations, biases, transposed weights."""
    if spec.gate is not None:
        yield from _branches(spec)
    for activation in ACTIVATIONS:
        if activation == spec.activation:
            continue
        text = "no activation" if activation == "none" else activation
        yield Variant(
            replace(spec, activation=activation),
            text,
            Claim(
                "activation", f"the activation of {spec.name} is {spec.activation}, the original has {text}"
            ),
            Claim("activation", f"{spec.name} runs with {text}, the config says {spec.activation}"),
        )
    yield from _biases(spec)
    joined = f"{spec.name}.gate_up_proj.weight"
    names = {"down": f"{spec.name}.down_proj.weight", "up": f"{spec.name}.up_proj.weight"}
    if spec.gate is not None:
        names |= {"up": f"the up half of {joined}", "gate": f"the gate half of {joined}"}
    for field, name in names.items():
        yield from transposed_variants(spec, field, name)


def _branches(spec: MlpSpec) -> Iterator[Variant[MlpSpec]]:
    assert spec.gate is not None
    swapped = replace(spec, gate=spec.up, up=spec.gate, gate_bias=spec.up_bias, up_bias=spec.gate_bias)
    halves = f"the halves of {spec.name}.gate_up_proj"
    yield Variant(
        swapped,
        f"{halves} exchanged",
        Claim("gate_up_swapped", f"gate and up of {spec.name} are swapped"),
        Claim("activation_branch", f"the activation of {spec.name} is on the wrong branch (up, not gate)"),
    )
    for on, text in (("both", "on both branches"), ("product", "on the product of both branches")):
        yield mirrored(
            replace(spec, on=on),  # type: ignore[arg-type]
            f"the activation {text}",
            "activation_branch",
            f"the activation of {spec.name} is on the wrong branch ({text})",
        )
    rows = spec.gate.shape[0] * 2
    both = _interleaved(spec)
    yield mirrored(
        both,
        f"the rows of {spec.name}.gate_up_proj taken as gate and up in turn, {rows} in all",
        "gate_up_interleaved",
        f"gate and up of {spec.name} are interleaved, row by row",
    )


def _interleaved(spec: MlpSpec) -> MlpSpec:
    """Gate from the even rows of both together, up from the odd ones."""
    assert spec.gate is not None
    weight = torch.cat([spec.gate, spec.up])
    changed = replace(spec, gate=weight[0::2], up=weight[1::2])
    if spec.gate_bias is None or spec.up_bias is None:
        return changed
    bias = torch.cat([spec.gate_bias, spec.up_bias])
    return replace(changed, gate_bias=bias[0::2], up_bias=bias[1::2])


def _biases(spec: MlpSpec) -> Iterator[Variant[MlpSpec]]:
    yield from bias_variants(spec, ("down_bias",), "mlp_bias", f"{spec.name}.down_proj.bias")
    if spec.gate is None:
        yield from bias_variants(spec, ("up_bias",), "mlp_bias", f"{spec.name}.up_proj.bias")
        return
    name = f"{spec.name}.gate_up_proj.bias"
    yield from bias_variants(spec, ("gate_bias", "up_bias"), "mlp_bias", name)
    yield from bias_variants(spec, ("gate_bias",), "mlp_bias", name, part="gate")
    yield from bias_variants(spec, ("up_bias",), "mlp_bias", name, part="up")
