"""RPTQ of each linear layer as if it were the only one, for ``ingot doctor``.

All inputs are those of the dense model. Nothing moves in other layers: the order of an input's channels is
kept beside the layer that reads it, as after a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ingot.building.calibration.calibrate import CalibratedLayer, Walk, dense_model
from ingot.building.calibration.calibration_data import CalibrationData
from ingot.building.calibration.input_statistics import rows_of
from ingot.building.calibration.rptq_layers import Maker, RptqLayers
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.engine.assembly import Assembly
from ingot.quant.methods.activation_statistics import InputStatistics
from ingot.quant.schemes.int8_blocks import Int8Blocks


@dataclass(frozen=True)
class AloneLayer:
    """A linear layer in blocks, and what it stores, on the CPU."""

    scheme: Int8Blocks
    tensors: dict[str, torch.Tensor]


class _Alone(RptqLayers):
    """Orders and values that need nothing of the layers before."""

    def in_blocks(self, name: str) -> Int8Blocks | None:
        scheme = super().in_blocks(name)
        return None if scheme is None else replace(scheme, ordered=True)

    def _move(self, layer: CalibratedLayer[Any], name: str, order: torch.Tensor, maker: Maker) -> None:
        """Leave the layer as it is."""


def calibrated_alone(
    assembly: Assembly,
    source: Checkpoint,
    data: CalibrationData,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> dict[str, AloneLayer]:
    """Every linear layer in blocks, by name; as many bytes of host memory as there are weights.

    Raises:
        BuildError: an input is not finite, or values cannot be chosen.
    """
    method = _Alone(assembly, device)
    load = partial(assembly.load, checkpoint=source, device=device)
    walk: Walk[InputStatistics] = Walk(
        dense_model(assembly),
        load,
        data.samples,
        device,
        method.statistic,  # type: ignore[arg-type]
        features=data.features,
        embeddings=rows_of(data, assembly),
        progress=progress,
    )
    found = {}
    for name in walk.layers:
        layer = walk.observe(name)
        for path, chosen in method.choose(layer):
            scheme = method.in_blocks(path)
            assert scheme is not None
            assert chosen.values is not None
            stored = scheme.accept(chosen.values)
            found[path] = AloneLayer(scheme, {leaf: tensor.cpu() for leaf, tensor in stored.items()})
        layer.inputs.clear()
        walk.advance(layer)
    return found
