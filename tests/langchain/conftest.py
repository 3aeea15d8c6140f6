"""The pocket chat model, opened once for all of LangChain's tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ingot import LLM

POCKET = Path(__file__).resolve().parents[2] / "models" / "pocket-chat"


@pytest.fixture(scope="session")
def pocket() -> LLM:
    return LLM(POCKET, device="cpu")


@pytest.fixture
def vcr() -> SimpleNamespace:
    """What a plugin that is off gives the one test of the kit that asks for it: nothing is recorded."""
    return SimpleNamespace(responses=[])
