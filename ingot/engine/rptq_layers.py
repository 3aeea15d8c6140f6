"""RPTQ of one decoder layer after another.

Owns what is gathered of a layer, where the order of its inputs is folded, and the settings that numbers are
chosen with. Knows no walk and no file.

    method = RptqLayers(config, schemes, others, device)

What a norm gives is put in order where it becomes numbers: the layer that reads it keeps the order (R1 of the
paper). Rows of values within their heads (R4, R5), and those of gate and up, take the order of the products
behind them, in any scheme, so that nothing is left of it at run time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from ingot.config.model import DecoderConfig
from ingot.engine.calibrate import CalibratedLayer, naming
from ingot.engine.gptq_layers import GptqLayers, Unseen
from ingot.quant.calibration import ChannelRange, InputStatistics
from ingot.quant.gptq import HessianSum, gptq
from ingot.quant.int8_blocks import Int8Blocks
from ingot.quant.plain_rows import rounded_blocks
from ingot.quant.rounding import Quantized, quantize
from ingot.quant.rptq import (
    InBlocks,
    block_lengths,
    block_ranges,
    channel_order,
    narrowed,
    order_by_heads,
    steps_of,
    two_levels,
)
from ingot.quant.weight_only import WeightOnly

SAMPLE = 512  # tokens that ranges of 4 bits are narrowed by
Gathered = InputStatistics | HessianSum | Unseen


class RptqLayers:
    """Orders, steps and numbers of layers of RPTQ, and GPTQ's numbers of ``others`` beside them.

    A layer sees what the layers before it give once quantized, inputs included. ``rounds``: numbers of
    weights are the nearest, instead of GPTQ's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        schemes: Mapping[str, Int8Blocks],
        others: Mapping[str, WeightOnly],
        device: torch.device,
        *,
        rounds: bool = False,
    ) -> None:
        self._config = config
        self._schemes = schemes
        self._others = GptqLayers(others, device)
        self._device = device
        self._rounds = rounds

    def statistic(self, name: str, in_features: int) -> Gathered:
        """Ranges and the sum of x·xᵀ of what layers of RPTQ read."""
        if name in self._schemes:
            sample = SAMPLE if self._schemes[name].input_bits == 4 else 0
            return InputStatistics.of(in_features, self._device, hessian=True, sample=sample)
        return Unseen() if self._rounds else self._others.statistic(name, in_features)

    def choose(self, layer: CalibratedLayer[Gathered]) -> Iterator[tuple[str, Quantized | InBlocks]]:
        """Orders of the whole layer, then the numbers of each narrow linear layer."""
        orders = {}
        for name, seen in layer.inputs.items():
            if isinstance(seen, InputStatistics):
                with naming(name):
                    orders[name] = self._order(layer, name, seen.ranges)
        for name, seen in layer.inputs.items():
            if isinstance(seen, InputStatistics):
                with naming(name):
                    yield name, self._in_blocks(layer, name, seen, orders[name])
            elif isinstance(seen, HessianSum):
                yield name, self._others.numbers(layer, name, seen)

    def _order(self, layer: CalibratedLayer[Gathered], name: str, ranges: ChannelRange) -> torch.Tensor:
        """That of an input's channels; where rows make them the rows, and the weight's columns, take it."""
        ranges.absmax()
        config, path = self._config, name.rpartition(".")[0]
        if self._schemes[name].ordered:
            return channel_order(ranges.lowest, ranges.highest)
        if name.endswith("o_proj"):
            heads, shared = config.num_kv_heads, config.num_heads // config.num_kv_heads
            rows, order = order_by_heads(ranges.lowest, ranges.highest, heads, shared)
            _move_rows(layer, f"{path}.qkv_proj", config.q_size + config.kv_size, rows, config.qkv_bias)
        else:
            order = channel_order(ranges.lowest, ranges.highest)
            gated = config.gated
            maker = f"{path}.gate_up_proj" if gated else f"{path}.up_proj"
            rows = torch.cat([order, order + len(order)]) if gated else order
            _move_rows(layer, maker, 0, rows, config.mlp_bias)
        weight = layer.weight(f"{name}.weight")
        layer.replace(f"{name}.weight", weight[:, order])
        return order

    def _in_blocks(
        self, layer: CalibratedLayer[Gathered], name: str, seen: InputStatistics, order: torch.Tensor
    ) -> InBlocks:
        scheme, weight = self._schemes[name], layer.weight(f"{name}.weight")
        assert seen.hessian is not None
        lengths = block_lengths(weight.shape[1], scheme.block)
        low, high = block_ranges(seen.ranges.lowest[order], seen.ranges.highest[order], lengths)
        columns = weight[:, order] if scheme.ordered else weight
        if seen.sample is not None:
            importance = columns.float().square().sum(0)
            low, high = narrowed(
                low, high, seen.sample.x[:, order], scheme.block, scheme.input_bits, importance
            )
        steps, zeros = steps_of(low, high, scheme.input_bits)
        hessian = seen.hessian.mean()[order][:, order]
        numbers, scales = _numbers(columns, hessian, scheme, rounds=self._rounds)
        kept = order if scheme.ordered else None
        near = numbers.float() * scales[:, None]
        layer.replace(f"{name}.weight", near if kept is None else _back(near, kept))
        bits, block = scheme.input_bits, scheme.block
        fake = partial(rounded_blocks, steps=steps, zeros=zeros, block=block, bits=bits, order=kept)
        layer.fake_input(name, fake)
        return InBlocks(numbers, scales, steps, zeros, kept)


def _numbers(
    weight: torch.Tensor, hessian: torch.Tensor, scheme: Int8Blocks, *, rounds: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N, K] and fp32 [N] of a weight [N, K] in the stored order, by GPTQ or the nearest."""
    wide, kind = weight.float(), torch.float32
    if scheme.weight_bits == 8:
        if rounds:
            found = quantize(wide, 8, scale_dtype=kind)
        else:
            found = gptq(wide, hessian, 8, act_order=True, static_groups=True, scale_dtype=kind).quantized
        return found.numbers, found.scales.float()
    levels = two_levels(wide, scheme.block, hessian.diagonal())
    if rounds:
        numbers = levels.nearest(wide, scheme.block)
    else:
        grid = levels.grid
        found = gptq(wide, hessian, 4, scheme.block, grid=grid, act_order=True, scale_dtype=kind).quantized
        numbers = found.numbers
    return levels.wide_numbers(numbers, scheme.block), levels.rows


def _move_rows(
    layer: CalibratedLayer[Gathered], name: str, start: int, rows: torch.Tensor, has_bias: bool
) -> None:
    """Outputs of a linear layer from ``start`` on in another order."""
    for leaf in ("weight", "bias") if has_bias else ("weight",):
        tensor = layer.weight(f"{name}.{leaf}").clone()
        end = start + len(rows)
        tensor[start:end] = tensor[start:end][rows]
        layer.replace(f"{name}.{leaf}", tensor)


def _back(weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Columns by the model's order again."""
    return torch.empty_like(weight).index_copy_(1, order, weight)
