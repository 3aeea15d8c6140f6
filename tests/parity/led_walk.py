"""A walk that is led: where it rounds to 8 bits, a value between two numbers goes where the modules' went.

Two right ways through a model sum floats in another order, and once in a while that moves a number of 8 bits
to its neighbour: a tie. What follows is then another computation. A led walk takes the modules' numbers
instead, at the input of every product and in a cache of 8 bits, after they were compared: neighbours at most,
and few. Owns the record and the comparison; knows no scheme.

    lead = Lead()
    with lead.recorded(): modules(batch)
    with lead.followed(): walk(batch)         # raises where a number is not a tie
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ingot.kernels.cache.qkv_placement import Placement
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.layers import attention
from ingot.layers.products import layer_products as products
from ingot.quant.schemes import int8_products
from tests.parity.kernel_witness import TIES

PRODUCTS = (  # what multiplies rows of 8 bits, in fused steps and in the modules
    *((products, name) for name in ("int8_linear", "int8_linear_parts", "small_int8_qkv")),
    (int8_products, "multiply"),
)
SCALES = 1e-5  # relative, of a row's scale by two ways in fp32


class Lead:
    """The numbers of one step by one way, for another."""

    def __init__(self) -> None:
        self.reported: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.total = self.moved = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep the numbers of the step inside."""

        def keep(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.reported.append((values.clone(), scales.clone()))
            return values, scales

        with _through(keep):
            yield

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Compare the numbers of the step inside, which goes on with those that were kept."""
        left = iter(self.reported)

        def follow(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            reported = next(left)
            away = (values.int() - reported[0].int()).abs()
            assert int(away.max()) <= 1
            torch.testing.assert_close(scales, reported[1], rtol=SCALES, atol=0)
            self.total += away.numel() if away.dim() == 2 else 0  # a cache is mostly of other steps
            self.moved += int(away.sum())
            return reported

        with _through(follow):
            yield
        assert next(left, None) is None
        assert self.moved <= max(TIES[torch.float32] * self.total, 1), f"{self.moved} of {self.total}"


Numbers = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def _through(numbers: Numbers) -> Iterator[None]:
    """Every product's rows, and every cache of 8 bits that was written, go through ``numbers``."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in PRODUCTS:
            patch.setattr(module, name, _of_rows(getattr(module, name), numbers))
        patch.setattr(attention, "rope_kv_write", _of_caches(attention.rope_kv_write, numbers))
        yield


def _of_rows(product: Callable[..., Any], numbers: Numbers) -> Callable[..., Any]:
    def called(x: Int8Rows, *rest: Any, **named: Any) -> Any:
        return product(Int8Rows(*numbers(x.values, x.scales), x.group), *rest, **named)

    return called


def _of_caches(write: Callable[..., Any], numbers: Numbers) -> Callable[..., Any]:
    def called(qkv: Any, place: Placement, *rest: Any) -> Any:
        query, cache = write(qkv, place, *rest), place.cache
        if cache.scales is not None:
            for stored, own in zip((cache.keys, cache.values), cache.scales.tensors, strict=True):
                values, reported = numbers(stored, own)
                stored.copy_(values)
                own.copy_(reported)
        return query

    return called
