"""What the kernel tests share: the implementations under test, the tolerance table, seeded inputs.

@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# (relative, absolute) distance from a float64 result; inputs are of order one.
TOLERANCES = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
}


@dataclass(frozen=True)
class Implementation:
    """One way to run an op: the public launcher on a device, or the kernel under the interpreter."""

    device: str
    interpreted: bool = False

    def __call__(self, public: Callable[..., Any], raw: Callable[..., Any]) -> Callable[..., Any]:
        return raw if self.interpreted else public


IMPLEMENTATIONS = [
    pytest.param(Implementation("cpu"), id="twin"),
    pytest.param(
        Implementation("cpu", interpreted=True),
        id="interpreted",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs here"),
    ),
    pytest.param(Implementation("cuda"), id="cuda", marks=pytest.mark.gpu),
]


def normal(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """``actual`` lies within its dtype's tolerance of the float64 ``expected``."""
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.to(actual.device), rtol=rtol, atol=atol)
