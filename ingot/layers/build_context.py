"""What a layer needs to be built: the engine's linear schemes, kernel plan and dtype, and the module's name.

ctx = BuildContext(QuantConfig(scheme), KernelPlan(), torch.float16)
ctx.at("layers.0").at("mlp").at("down_proj").scheme()
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ingot.config.kernel_plan import KernelPlan, TileTable
from ingot.config.quantization.quant_config import QuantConfig
from ingot.quant.schemes.linear_scheme import LinearScheme
from ingot.quant.schemes.scheme_registry import make_scheme


@dataclass(frozen=True)
class BuildContext:
    """Passed down the module tree; ``dtype``: of weights and activations; ``path``: the module's name."""

    quant: QuantConfig
    plan: KernelPlan
    dtype: torch.dtype
    path: str = ""

    def at(self, name: str) -> BuildContext:
        """The context of a submodule."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def scheme(self, input_group: int = 0, *, free_order: bool = False) -> LinearScheme:
        """The scheme of a linear layer of this name; arguments are as of ``make_scheme``."""
        return make_scheme(self.quant.at(self.path), input_group, free_order=free_order)

    def product_tiles(self, op: str, **shape: int) -> TileTable:
        """The plan's tiles for a small product of the layer of this name; none unless it is dense."""
        return self.plan.table(op, **shape) if self.scheme().dense else TileTable({})


def empty_weight(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """An uninitialised, frozen weight of this shape on the current default device."""
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
