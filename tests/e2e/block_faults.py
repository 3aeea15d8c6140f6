"""Small faults in products by blocks (RPTQ), in engines whose hashes are right.

with block_fault("a scale x 1.01", "layers.0.mlp.down_proj", block=1): ...     # engines that are loaded
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from ingot import LLM
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import Engine
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight
from ingot.layers.linear import Linear
from ingot.quant.schemes import int8_products

Change = Callable[[Linear, int], None]
Sums = Callable[[Int8Rows, Int8Weight, int], torch.Tensor]  # fp32 [M, N], before the rows' scales


def _tensor(linear: Linear, name: str) -> torch.Tensor:
    tensor = linear._parameters[name]
    assert tensor is not None
    return tensor.data


def _zero_off_by_one(linear: Linear, block: int) -> None:
    _tensor(linear, "zeros")[block] += 1


def _larger_scale(linear: Linear, block: int) -> None:
    _tensor(linear, "steps")[block] *= 1.01


def _without_zeros(linear: Linear, block: int) -> None:
    """What the zeros of a block take away is not in the shift; where they are 0, as of zeros of 1."""
    taken = _columns(linear, block).double().sum(1) * _tensor(linear, "scales")
    zero = float(_tensor(linear, "zeros")[block]) or 1.0
    _tensor(linear, "shift").add_(taken * _tensor(linear, "steps")[block] * zero)


def _short_shift(linear: Linear, block: int) -> None:
    _tensor(linear, "shift").copy_(_tensor(linear, "shift").half())


def _channels_exchanged(linear: Linear, block: int) -> None:
    """The last channel of a block and the first of the next: each has the other's cluster."""
    order, last = _tensor(linear, "order"), (block + 1) * linear.in_blocks().steps.block - 1
    order[last : last + 2] = order[last : last + 2].flip(0)


def _columns(linear: Linear, block: int) -> torch.Tensor:
    width = linear.in_blocks().steps.block
    return _tensor(linear, "weight")[:, block * width : (block + 1) * width]


def _louder_block(x: Int8Rows, weight: Int8Weight, block: int) -> torch.Tensor:
    """A block's sum counts 1.001 times."""
    return _sums(x, weight) + 0.001 * _part(x, weight, block, 0, x.group)


def _late_boundary(x: Int8Rows, weight: Int8Weight, block: int) -> torch.Tensor:
    """The block takes the next one's first column, too, and that one lacks it."""
    own = _part(x, weight, block, x.group, x.group + 1)
    return _sums(x, weight) + own - _part(x, weight, block + 1, 0, 1)


def _sums(x: Int8Rows, weight: Int8Weight) -> torch.Tensor:
    blocks = range(x.values.shape[1] // x.group)
    return torch.stack([_part(x, weight, block, 0, x.group) for block in blocks]).sum(0)


def _part(x: Int8Rows, weight: Int8Weight, block: int, start: int, end: int) -> torch.Tensor:
    """Columns ``start`` to ``end`` from a block's first on, by its scale."""
    own = slice(block * x.group + start, block * x.group + end)
    return (x.values[:, own].double() @ weight.values[:, own].double().T) * x.scales[:, block, None]


TENSORS: dict[str, Change] = {
    "a zero off by one": _zero_off_by_one,
    "a scale x 1.01": _larger_scale,
    "zeros of a block are not taken away": _without_zeros,
    "the shift in fp16": _short_shift,
    "two channels exchanged": _channels_exchanged,
}
SUMS: dict[str, Sums] = {"a block x 1.001": _louder_block, "a boundary off by one": _late_boundary}
BLOCK_FAULTS = (*TENSORS, *SUMS)


@contextmanager
def block_fault(fault: str, name: str, block: int) -> Iterator[None]:
    """Every engine that is loaded within has the fault in a block of this layer's product."""
    right, product, weights = LLM._setup, int8_products.cpu_int8_product, set[int]()

    def setup(self: LLM, engine: Engine, runtime: RuntimeConfig) -> None:
        linear = engine.model.get_submodule(name)
        assert isinstance(linear, Linear)
        weights.add(_tensor(linear, "weight").data_ptr())
        TENSORS.get(fault, _unchanged)(linear, block)
        right(self, engine, runtime)

    def multiply(
        x: Int8Rows, weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if fault not in SUMS or weight.values.data_ptr() not in weights:
            return product(x, weight, dtype, bias)
        y = SUMS[fault](x, weight, block) * weight.scales
        return (y if bias is None else y + bias).to(dtype)

    with patch.object(LLM, "_setup", setup), patch.object(int8_products, "cpu_int8_product", multiply):
        yield


def _unchanged(linear: Linear, block: int) -> None:
    return
