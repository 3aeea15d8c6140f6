"""Where the third-party test data is, and which tests need a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU the kernels' numbers are checked under Triton's interpreter, which must be chosen before
    # any kernel is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(
    1
)  # test workers share the cores; threads that wait for each other cost more than they bring

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("INGOT_TEST_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of third-party test data; skips where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no test data at {DATA}; set INGOT_TEST_DATA")
    return DATA


@pytest.fixture(scope="session")
def golden(data: Path) -> Path:
    """The golden outputs of the original implementations."""
    return data / "golden"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` skip, saying so, where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
