"""An engine's weights by logical name, quantized layers dequantized, without loading a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import model_of
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.engine.weights_file import WeightsReader
from ingot.layers.linear import linears

_FOLDED = ("awq", "smoothquant")


class EngineWeights:
    """An engine's tensors by logical name."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.manifest = manifest or Manifest.read(folder)
        self._linears = linears(model_of(self.manifest))
        self._reader = WeightsReader(folder / WEIGHTS_FILE)

    @property
    def quantized(self) -> dict[str, str]:
        """Schemes of the quantized linear layers, by name."""
        return {name: linear.scheme.name for name, linear in self._linears.items() if not linear.scheme.dense}

    def names(self) -> Iterator[str]:
        """Logical names of all tensors; ``lm_head.weight`` of a tied head only where it is stored."""
        packed, shown = self.quantized, set()
        for name in self.manifest.tensors:
            layer, _, leaf = name.rpartition(".")
            if layer not in packed or leaf == "bias":
                yield name
            elif layer not in shown:
                shown.add(layer)
                yield f"{layer}.weight"

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU; a quantized weight in fp32."""
        layer, _, leaf = name.rpartition(".")
        linear = self._linears.get(layer)
        if leaf != "weight" or linear is None or linear.scheme.dense:
            return self._reader.read(name)
        names = {own: f"{layer}.{own}" for own in linear._parameters if own != "bias"}
        tensors = {own: self._reader.read(n) for own, n in names.items() if n in self.manifest.tensors}
        return linear.scheme.dequantize(tensors, linear.in_features, torch.float32)

    def release(self) -> None:
        self._reader.release()


def comparable(one: QuantConfig, other: QuantConfig) -> str | None:
    """Why the weights of two engines of one model cannot be compared; None: they can."""
    for quant in (one, other):
        if quant.method in _FOLDED:
            return f"{quant.method} rescales channels"
        if quant.in_blocks:
            return "RPTQ reorders channels"
    return "a rotation changes all weights" if one.rotation != other.rotation else None
