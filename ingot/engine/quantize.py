"""Numbers of fewer bits, chosen by what a checkpoint's layers see.

Owns the joint between the walk over calibration samples and the way numbers are chosen, for the linear layers
that a build stores in fewer bits; the head is not among them. Holds one decoder layer's numbers at a time:
what asks for them in the model's order (packed_tensors) moves the walk on. Writes nothing.

    data = read_samples(calib, text, count, build)
    chosen = GptqNumbers(assembly, load, data.samples, device)
    for name, tensor in assembly.tensors(source, device, chosen): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ingot.config.build import BuildConfig
from ingot.config.quant import HEAD
from ingot.engine.assemble import Assembly, stored_tensors
from ingot.engine.calibrate import CalibratedLayer, Load, calibrate, dense_model
from ingot.engine.golden import steady_threads
from ingot.engine.manifest import CalibrationEntry
from ingot.engine.text import TextParts
from ingot.errors import BuildError, OutOfMemoryError
from ingot.layers.linear import linears
from ingot.processors.calibration_data import LENGTH, CalibrationData, read_calibration_data
from ingot.quant.gptq import HessianSum, gptq
from ingot.quant.rounding import Quantized, dequantize
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


class GptqNumbers:
    """The numbers of every narrow linear layer of the decoder, by GPTQ on the layer's own inputs.

    A layer sees what the layers before it give once quantized, so that it makes up for their errors. Columns
    are taken by the size of their inputs, with scales of the weight as it is, in 4 bits of ranges that the
    inputs weigh (gptq.py: ``act_order``, ``static_groups``, ``clip``). A machine gives the same numbers for
    the same samples and number of threads.
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
            if name != HEAD and isinstance(linear.scheme, WeightOnly)
        }
        self._device = device
        self._tell = tell or _silent
        self._found: dict[str, Quantized] = {}
        model = dense_model(assembly)
        self._num_bytes = sum(t.numel() * t.element_size() for t in stored_tensors(model).values())
        self._walk = calibrate(
            model, load, samples, device, self._statistic, propagate=True, progress=self._told
        )

    def __call__(self, name: str) -> Quantized | None:
        """The numbers of one linear layer, once; None: it is not narrow, or it is the head.

        Raises:
            BuildError: what a layer sees is not finite, or its numbers cannot be chosen.
            OutOfMemoryError: the GPU cannot hold a layer, what is gathered of it and a batch of samples.
        """
        if name not in self._schemes:
            return None
        try:
            with steady_threads(self._num_bytes, self._device):
                while name not in self._found:
                    self._choose(next(self._walk))
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                "calibration does not fit the device", seen=f"{name} on {self._device}", fix="--device cpu"
            ) from None
        return self._found.pop(name)

    def _choose(self, layer: CalibratedLayer[_Seen]) -> None:
        for name, seen in layer.inputs.items():
            if isinstance(seen, HessianSum):
                self._tell(f"{name} by GPTQ")
                found = self._numbers(name, layer.weight(f"{name}.weight"), seen)
                self._found[name] = found
                layer.replace(f"{name}.weight", dequantize(found))

    def _numbers(self, name: str, weight: torch.Tensor, seen: HessianSum) -> Quantized:
        scheme = self._schemes[name]
        try:
            return gptq(
                weight,
                seen.mean(),
                scheme.bits,
                scheme.group,
                symmetric=scheme.symmetric,
                act_order=True,
                static_groups=True,
                clip=scheme.bits == 4,
                scale_dtype=weight.dtype,
            ).quantized
        except BuildError as error:
            raise BuildError(f"{name}: {error.what}", seen=error.seen, fix=error.fix) from None

    def _statistic(self, name: str, in_features: int) -> _Seen:
        return HessianSum(in_features, self._device) if name in self._schemes else _Unseen()

    def _told(self, what: str, done: int, total: int) -> None:
        self._tell(f"{what} {100 * done // total} %")


class _Unseen:
    """Nothing of an input."""

    def add(self, x: torch.Tensor) -> None:
        return


_Seen = HessianSum | _Unseen


def _silent(what: str) -> None:
    return
