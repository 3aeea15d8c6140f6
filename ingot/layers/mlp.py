"""Gated and plain MLPs.

mlp.activate(gate_up)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import StackConfig
from ingot.kernels.activation.gated_mlp import Gate, silu_mul
from ingot.kernels.activation.plain_activation import Plain, plain_activation
from ingot.layers.build_context import BuildContext
from ingot.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with SiLU or tanh GELU; gate and up are one product, gate first."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.activation: Gate = "gelu_tanh" if config.activation == "gelu_tanh" else "silu"
        self.tiles = ctx.plan.table("silu_mul", i=inner)
        gate_up, down = ctx.at("gate_up_proj"), ctx.at("down_proj")
        self.small_tiles = gate_up.product_tiles("small_gate_up", n=2 * inner, k=size)
        self.gate_up_proj = Linear(size, 2 * inner, bias=config.mlp_bias, ctx=gate_up)
        self.down_proj = Linear(inner, size, bias=config.mlp_bias, ctx=down, free_order=True)

    def activate(self, gate_up: torch.Tensor, tiles: Mapping[str, int] | None = None) -> torch.Tensor:
        """act(gate) * up of [T, 2 intermediate_size]; ``tiles`` override the plan's."""
        choice = self.tiles.at(gate_up.shape[0], tiles)
        return silu_mul(gate_up, tiles=choice, activation=self.activation)


class MLP(nn.Module):
    """down(act(up(x))) with GELU (exact or tanh) or ReLU."""

    def __init__(self, config: DecoderConfig | StackConfig, ctx: BuildContext) -> None:
        super().__init__()
        assert config.activation != "silu"
        self.activation: Plain = config.activation
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up_proj = Linear(size, inner, bias=bias, ctx=ctx.at("up_proj"))
        self.down_proj = Linear(inner, size, bias=bias, ctx=ctx.at("down_proj"), free_order=True)

    def activate(self, inner: torch.Tensor, tiles: Mapping[str, int] | None = None) -> torch.Tensor:
        """act(up) of [T, intermediate_size]; there are no ``tiles``."""
        return plain_activation(inner, self.activation)


def make_mlp(config: DecoderConfig, ctx: BuildContext) -> GatedMLP | MLP:
    """The MLP that the config names."""
    return GatedMLP(config, ctx) if config.gated else MLP(config, ctx)
