"""Tiny models run fastest on one thread, and kernels under an interpreter that repeats nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.quick_interpreter import quicken


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """One thread for every test of this folder."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton interprets takes a third less time."""
    quicken(monkeypatch)
