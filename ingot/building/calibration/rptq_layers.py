"""RPTQ of one layer after another, with GPTQ for other layers beside it (quant/schemes/int8_blocks.py).

What a norm gives is put in order where it is quantized: the layer that reads it keeps the order (R1 and R4 of
the paper). Rows of values within their heads (R3), and those of gate and up (R5), take the order of the
products behind them, in any scheme, so that nothing is left of it at run time. An input that is not reordered
has one scale, as in the paper's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from ingot.building.calibration.calibrate import CalibratedLayer, Statistic, naming
from ingot.building.calibration.gptq_layers import GptqLayers
from ingot.building.calibration.layer_method import Report, silent
from ingot.building.calibration.rescaling import layer_shape, value_rows_of
from ingot.config.decoder_config import DecoderConfig
from ingot.config.quantization.rptq_options import SITES, RptqConfig, site_of
from ingot.engine.assembly import Assembly, ChosenValues
from ingot.engine.manifest import KindRanges
from ingot.quant.methods.activation_statistics import ChannelRange, InputStatistics, RecordRanges
from ingot.quant.methods.channel_clusters import channel_orders, orders_by_heads
from ingot.quant.schemes.int8_blocks import Int8Blocks
from ingot.quant.schemes.linear_scheme import LinearScheme

SAMPLE = 512  # tokens that choose between orders, and that ranges are cut by


class RptqLayers(GptqLayers):
    """Orders, scales and values of layers in blocks, which see the quantized layers before them."""

    def __init__(self, assembly: Assembly, device: torch.device, report: Report = silent) -> None:
        super().__init__(assembly, device, report)
        self._seen_kinds: dict[str, tuple[ChannelRange, ChannelRange]] = {}  # tokens, spliced positions

    @property
    def _rptq(self) -> RptqConfig:
        assert self.quant.rptq is not None
        return self.quant.rptq

    def takes(self, name: str, scheme: LinearScheme) -> bool:
        return scheme.form == "blocks" or super().takes(name, scheme)

    def in_blocks(self, name: str) -> Int8Blocks | None:
        """The scheme of a linear layer; None: its input is not in blocks."""
        scheme = self.schemes.get(name)
        return cast(Int8Blocks, scheme) if scheme is not None and scheme.form == "blocks" else None

    def statistic(self, name: str, in_features: int) -> Statistic | None:
        scheme = self.in_blocks(name)
        if scheme is None:
            return super().statistic(name, in_features)
        return InputStatistics.of(in_features, self.device, hessian=True, sample=SAMPLE, records=True)

    def choose(self, layer: CalibratedLayer[Any]) -> Iterator[tuple[str, ChosenValues]]:
        """Orders of the whole layer, then the values of each narrow linear layer."""
        schemes = {name: self.in_blocks(name) for name in layer.inputs if name in self.schemes}
        orders = {}
        for name, scheme in schemes.items():
            if scheme is None:
                continue
            records: RecordRanges = layer.inputs[name].records
            found = self._seen_kinds.setdefault(site_of(name), (ChannelRange(1), ChannelRange(1)))
            for seen, own in zip(found, (records.tokens, records.spliced), strict=True):
                if own.count:
                    ends = torch.stack([own.lowest.amin(), own.highest.amax()])
                    seen.add(ends.cpu()[:, None])
            with naming(name):
                orders[name] = self._order(layer, name, scheme, layer.inputs[name])
        for name, scheme in schemes.items():
            if scheme is None:
                yield name, self.choice(layer, name)
                continue
            weight = layer.weight(f"{name}.weight")
            with naming(name):
                values = scheme.chosen(
                    weight,
                    layer.inputs[name],
                    orders[name],
                    ranges=self._rptq.ranges,
                    one_scale=site_of(name) not in self._rptq.reorder,
                    rounds=self.quant.method == "round",
                )
                tensors = scheme.accept(values)
                layer.replace(f"{name}.weight", scheme.dequantize(tensors, weight.shape[1], torch.float32))
            layer.fake_input(name, partial(scheme.rounded, tensors=tensors))
            self.report_layer(name)
            yield name, ChosenValues(values)

    @property
    def kinds(self) -> dict[str, KindRanges]:
        """Ranges of tokens and of spliced positions by site, of the layers so far; those that saw both."""
        found = {}
        for site in SITES:
            pair = self._seen_kinds.get(site)
            if pair is not None and pair[0].count and pair[1].count:
                found[site] = KindRanges(*((float(one.lowest), float(one.highest)) for one in pair))
        return found

    def _order(
        self, layer: CalibratedLayer[Any], name: str, scheme: Int8Blocks, seen: InputStatistics
    ) -> torch.Tensor:
        """The order of an input's channels; rows that make them, and the weight's columns, take it."""
        ranges, weight = seen.ranges, layer.weight(f"{name}.weight")
        ranges.absmax()
        site = site_of(name)
        if site not in self._rptq.reorder:
            return torch.arange(len(ranges.lowest), device=self.device)
        cost = partial(scheme.cost, weight, seen, ranges=self._rptq.ranges)
        both, clusters = (ranges.lowest, ranges.highest), self._rptq.clusters[site]
        path = name.rpartition(".")[0]
        is_free = not cast(Int8Blocks, self.schemes[name]).ordered
        if is_free and name.endswith(".o_proj"):
            made = value_rows_of(self.config, path)
            heads, shared = made.num_kv_heads, made.num_heads // made.num_kv_heads
            pairs = orders_by_heads(*both, heads, shared, block=scheme.block, clusters=clusters)
            rows, order = min(pairs, key=lambda pair: cost(pair[1]))
            maker = Maker(made.maker, made.start, rows, made.has_bias)
        else:
            order = min(channel_orders(*both, scheme.block, clusters), key=cost)
            if not is_free:
                return order
            shape = layer_shape(self.config, name)
            gated = isinstance(shape, DecoderConfig) and shape.gated
            rows = torch.cat([order, order + len(order)]) if gated else order
            maker = Maker(f"{path}.gate_up_proj" if gated else f"{path}.up_proj", 0, rows, shape.mlp_bias)
        self._move(layer, name, order, maker)
        return order

    def _move(self, layer: CalibratedLayer[Any], name: str, order: torch.Tensor, maker: Maker) -> None:
        """Put an input's channels in order: the rows that make them, and the weight's columns."""
        start, end = maker.start, maker.start + len(maker.rows)
        for leaf in ("weight", "bias") if maker.has_bias else ("weight",):
            tensor = layer.weight(f"{maker.name}.{leaf}").clone()
            tensor[start:end] = tensor[start:end][maker.rows]
            layer.replace(f"{maker.name}.{leaf}", tensor)
        layer.replace(f"{name}.weight", layer.weight(f"{name}.weight")[:, order])


@dataclass(frozen=True)
class Maker:
    """The linear layer that makes an input: its outputs from ``start`` on will be in the order ``rows``."""

    name: str
    start: int
    rows: torch.Tensor
    has_bias: bool
