"""How verify tells a limit."""

from __future__ import annotations

import pytest

from ingot.engine.sketch import OVERFLOW
from ingot.llm.replay import percent


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (5.7e-6, "0.00057 %"),
        (0.0234, "2.3 %"),
        (0.2114, "21 %"),
        (0.996, "100 %"),
        (1.3766, "138 %"),
        (OVERFLOW, "1e+32 %"),
    ],
)
def test_a_limit_larger_than_what_it_limits_has_no_exponent(share: float, text: str) -> None:
    assert percent(share) == text
