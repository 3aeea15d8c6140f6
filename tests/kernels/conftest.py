"""For every kernel test: allocated memory that is never written reads as NaN, and the interpreter rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.interpreter import fill_bfloat16_gaps


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """``torch.empty`` hands out NaN, so that an element a kernel forgets fails its comparison."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def rounding_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 under the interpreter behaves as on a GPU."""
    fill_bfloat16_gaps(monkeypatch)
