"""A planted fault: pictures' rows are spliced where they do not belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ingot.runtime.scheduling import scheduled_batch


def misplace_pictures(monkeypatch: pytest.MonkeyPatch, fault: Callable[[np.ndarray], np.ndarray]) -> None:
    """``fault`` changes the rows of each step that splices some (``StepInputs.spliced``, [T])."""
    place = scheduled_batch._spliced

    def misplaced(*args: Any) -> np.ndarray | None:
        found = place(*args)
        return None if found is None else fault(found)

    monkeypatch.setattr(scheduled_batch, "_spliced", misplaced)
