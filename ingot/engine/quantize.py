"""A decoder's weights as a method that calibrates stores them.

Owns the joint between the walk over calibration samples and the way numbers are chosen (gptq_layers.py,
awq_layers.py), for the linear layers that a build stores in fewer bits; the head is not among them. Holds one
decoder layer at a time: what asks for its tensors and numbers in the model's order (packed_tensors) moves
the walk on. Writes nothing.

    data = read_samples(calib, text, count, build)
    chosen = CalibratedWeights(assembly, load, data.samples, device)
    for name, tensor in assembly.tensors(source, device, chosen): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ingot.config.build import BuildConfig
from ingot.config.quant import HEAD
from ingot.device import parse_dtype
from ingot.engine.assemble import Assembly, cast_weight, stored_tensors
from ingot.engine.awq_layers import AwqLayers
from ingot.engine.calibrate import CalibratedLayer, Load, Statistic, calibrate, dense_model
from ingot.engine.golden import steady_threads
from ingot.engine.gptq_layers import GptqLayers
from ingot.engine.manifest import CalibrationEntry
from ingot.engine.rptq_layers import RptqLayers
from ingot.engine.text import TextParts
from ingot.errors import OutOfMemoryError
from ingot.layers.linear import linears
from ingot.processors.calibration_data import LENGTH, CalibrationData, read_calibration_data
from ingot.quant.int4_in_int8 import Int4InInt8
from ingot.quant.int8_blocks import Int8Blocks
from ingot.quant.rounding import Quantized
from ingot.quant.rptq import InBlocks
from ingot.quant.weight_only import WeightOnly

Tell = Callable[[str], None]


def read_samples(path: Path, text: TextParts, count: int, build: BuildConfig) -> CalibrationData:
    """At most ``count`` samples of a file, each as long as the build takes, 512 tokens at most.

    Raises:
        ConfigError: as ``read_calibration_data``.
    """
    length = min(LENGTH, build.max_seq_len)
    return read_calibration_data(path, text.tokenizer, text.chat, samples=count, length=length)


def calibration_entry(data: CalibrationData, build: BuildConfig) -> CalibrationEntry:
    """What an engine's manifest says of its samples."""
    length = min(LENGTH, build.max_seq_len)
    return CalibrationEntry(data.sha256, len(data.samples), data.num_tokens, length)


class Method(Protocol):
    """A way of choosing a layer's numbers by what its products read."""

    def statistic(self, name: str, in_features: int) -> Statistic:
        """What gathers the input of one linear layer."""
        ...

    def choose(self, layer: CalibratedLayer[Any]) -> Iterator[tuple[str, Quantized | InBlocks]]:
        """The numbers of each narrow linear layer; other parameters of the layer may be replaced, too, before
        the first is given. Layers after this one see all that was replaced.
        """
        ...


class CalibratedWeights:
    """The tensors of a decoder before packing, and the numbers of every narrow linear layer of it.

    A machine gives the same for the same samples and number of threads.
    """

    def __init__(
        self,
        assembly: Assembly,
        load: Load,
        samples: Sequence[Sequence[int]],
        device: torch.device,
        tell: Tell | None = None,
    ) -> None:
        """``load`` gives dense tensors by name; ``tell`` is called with what is under way."""
        self._schemes = {
            name: linear.scheme
            for name, linear in linears(assembly.model).items()
            if name != HEAD and isinstance(linear.scheme, _chosen_kinds(assembly.quant.method))
        }
        self._fp32 = {name for name, linear in linears(assembly.model).items() if linear.scheme.packs_fp32}
        self._quant = assembly.quant
        self._dtype = parse_dtype(assembly.build.dtype)
        self._dtype_of = assembly.dtype_of
        self._device = device
        self._load = load
        self._tell = tell or _silent
        self._found: dict[str, Quantized | InBlocks] = {}
        self._layer: CalibratedLayer[Any] | None = None
        self._method = self._make_method(assembly)
        model = dense_model(assembly)
        self._num_bytes = sum(t.numel() * t.element_size() for t in stored_tensors(model).values())
        self._walk = calibrate(
            model, load, samples, device, self._method.statistic, propagate=True, progress=self._told
        )

    def load(self, name: str) -> torch.Tensor:
        """A tensor as it is before packing, of a layer on the device: fp32 where it is packed with its input
        in 8 bits, else in the engine's dtype.

        Raises:
            BuildError: what a layer sees is not finite, its numbers cannot be chosen, or a factor that was
                folded into the tensor does not leave it within the dtype.
            OutOfMemoryError: the GPU cannot hold a layer, what is gathered of it and a batch of samples.
        """
        index = _layer_of(name)
        if index is None:
            return self._load(name)
        tensor = self._reach(index).weight(name)
        wide = name.removesuffix(".weight") in self._fp32
        return tensor.float() if wide else cast_weight(name, tensor, self._dtype_of(name))

    def numbers(self, name: str) -> Quantized | InBlocks | None:
        """The numbers of one linear layer, once; None: it is not narrow, or it is the head.

        Raises:
            BuildError, OutOfMemoryError: as ``load``.
        """
        if name not in self._schemes:
            return None
        index = _layer_of(name)
        assert index is not None, name
        self._reach(index)
        return self._found.pop(name)

    def input_scale(self, name: str) -> None:
        """Activations keep their dtype, or the scales that they come with."""
        return

    def _reach(self, index: int) -> CalibratedLayer[Any]:
        """The layer ``index``, whose numbers are chosen; layers before it are gone."""
        try:
            with steady_threads(self._num_bytes, self._device):
                while self._layer is None or self._layer.index < index:
                    self._layer = next(self._walk)
                    for name, found in self._method.choose(self._layer):
                        self._tell(f"{name} by {self._quant.method_word}")
                        self._found[name] = found
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                "calibration does not fit in the device's memory",
                seen=f"layers.{index} on {self._device}",
                fix="--device cpu",
            ) from None
        assert self._layer.index == index, f"layers.{index} was requested after layers.{self._layer.index}"
        return self._layer

    def _make_method(self, assembly: Assembly) -> Method:
        plain = {name: one for name, one in self._schemes.items() if isinstance(one, WeightOnly)}
        clusters = {name: one for name, one in self._schemes.items() if isinstance(one, Int8Blocks)}
        if self._quant.method == "awq":
            return AwqLayers(assembly.model_config, plain, self._dtype, self._device)
        if not clusters:
            assert self._quant.method == "gptq", self._quant.method
            return GptqLayers(self._schemes, self._device)
        config, rounds = assembly.model_config, self._quant.method == "round"
        return RptqLayers(config, clusters, plain, self._device, rounds=rounds)

    def _told(self, what: str, done: int, total: int) -> None:
        self._tell(f"{what} {100 * done // total} %")


def _chosen_kinds(method: str | None) -> tuple[type, ...]:
    """The schemes whose numbers a method chooses."""
    return (WeightOnly, Int8Blocks, Int4InInt8) if method == "gptq" else (WeightOnly, Int8Blocks)


def _layer_of(name: str) -> int | None:
    """The decoder layer that a parameter or module is of."""
    head, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if head == "layers" else None


def _silent(what: str) -> None:
    return
