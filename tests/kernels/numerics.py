"""What the kernel tests share: the implementations under test, the tolerance table, seeded inputs.

@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

DRAWN_ON_CPU = 1 << 18

# (relative, absolute) distance from a float64 result; inputs are of order one.
TOLERANCES = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
}


Op = Callable[..., Any]


def launched(op: Op) -> Op:
    """An op that launches its kernel wherever its tensors are: on the CPU under the interpreter."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(sys.modules[op.__module__], "runs_on_gpu", return_value=True):
            return op(*args, **kwargs)

    return call


@dataclass(frozen=True)
class Implementation:
    """One way to run an op: as it is on a device, or its kernel under the interpreter."""

    device: str
    interpreted: bool = False

    def __call__(self, op: Op, raw: Op | None = None) -> Op:
        """``raw``: what launches the kernel unchecked, of ops that have such a function."""
        if not self.interpreted:
            return op
        return launched(op) if raw is None else raw


IMPLEMENTATIONS = [
    pytest.param(Implementation("cpu"), id="reference"),
    pytest.param(
        Implementation("cpu", interpreted=True),
        id="interpreted",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs here"),
    ),
    pytest.param(Implementation("cuda"), id="cuda", marks=pytest.mark.gpu),
]


def in_fp32(names: Iterable[str], halves: Collection[str]) -> list[str]:
    """Ids ``name-dtype-impl`` of every case in fp32, and of the cases ``halves`` in all dtypes."""
    return [
        f"{name}-dtype{place}-{impl}"
        for name in names
        for place in range(len(DTYPES) if name in halves else 1)
        for impl in ("reference", "interpreted")
    ]


def normal(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Standard normal numbers; the same on every device, except that large tensors are drawn where they
    live.
    """
    source = device if math.prod(shape) > DRAWN_ON_CPU else "cpu"
    generator = torch.Generator(source).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=source).to(device=device, dtype=dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, loosen: float = 1.0) -> None:
    """``actual`` lies within its dtype's tolerance, times ``loosen``, of the float64 ``expected``."""
    rtol, atol = TOLERANCES[actual.dtype]
    expected = expected.to(actual.device)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol * loosen, atol=atol * loosen)
