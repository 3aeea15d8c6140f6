"""The pocket chat model, opened once for all of LangChain's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot import LLM

POCKET = Path(__file__).resolve().parents[2] / "models" / "pocket-chat"


@pytest.fixture(scope="session")
def pocket() -> LLM:
    return LLM(POCKET, device="cpu")
