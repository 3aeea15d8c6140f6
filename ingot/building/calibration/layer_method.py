"""What the methods of calibration, each of them a file ``…_layers.py``, have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from ingot.building.calibration.calibrate import CalibratedLayer, Statistic
from ingot.config.quantization.quant_config import HEAD
from ingot.device import parse_dtype
from ingot.engine.assembly import Assembly, ChosenValues
from ingot.layers.linear import linears
from ingot.quant.schemes.linear_scheme import LinearScheme

Report = Callable[[str], None]


def silent(what: str) -> None:
    """Report nothing."""


class LayerMethod(ABC):
    """A way of choosing what a layer stores by what its products read.

    Attributes:
        name: as in ``QuantConfig``.
        schemes: of the linear layers that it chooses for, by name; the head is not among them.
    """

    name: ClassVar[str]

    def __init__(self, assembly: Assembly, device: torch.device, report_layer: Report = silent) -> None:
        self.config = assembly.model_config
        self.quant = assembly.quant
        self.dtypes = assembly.build.dtypes
        self.dtype_of = assembly.dtype_of
        self.device = device
        self._report = report_layer
        self.schemes = {
            name: linear.scheme
            for name, linear in linears(assembly.model).items()
            if name != HEAD and self.takes(name, linear.scheme)
        }

    def half(self, name: str) -> torch.dtype:
        """The dtype of the half that a module is in."""
        return parse_dtype(self.dtypes.at(name))

    def takes(self, name: str, scheme: LinearScheme) -> bool:
        """Whether it chooses for a linear layer."""
        return self.quant.at(name).method == self.name

    @abstractmethod
    def statistic(self, name: str, in_features: int) -> Statistic | None:
        """What gathers the input of one linear layer; None: nothing does."""

    @abstractmethod
    def choose(self, layer: CalibratedLayer[Any]) -> Iterator[tuple[str, ChosenValues]]:
        """What linear layers store, by name; other parameters of the layer may be replaced too, before the
        first is given. Raises BuildError where an input is not finite, or values cannot be chosen.
        """

    def report_layer(self, name: str) -> None:
        """Report which linear layer is in progress."""
        self._report(f"{name} by {self.quant.method_word}")
