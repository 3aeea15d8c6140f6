"""What counts as an explanation, and whose divergences are asked: without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.align.diagnosis import search
from ingot.align.diagnosis.variant import Claim, Variant
from ingot.align.divergence import Divergence, Finding

BEFORE, REACH = 4e-3, 4e-3


def divergence(stage: str, layer: int, step: int) -> Divergence:
    rows = torch.zeros(1, 2)
    return Divergence(stage, layer, step, torch.zeros(1, dtype=torch.int64), rows, rows, rows + 1, 1e-6)


def found_by(errors: dict[str, float], before: float = BEFORE) -> list[str]:
    """Culprits that are found where each variant leaves an error."""
    bench: Any = SimpleNamespace(before=before, reach=REACH, code=False, error=errors.__getitem__)
    variants = [
        Variant(name, name, Claim(name, name), Claim(name, name))  # type: ignore[arg-type]
        for name in errors
    ]
    return [finding.culprit for finding in search._rank(bench, variants)]


def test_a_variant_that_hardly_helps_is_no_explanation() -> None:
    """A difference near the floor is within reach of every small change."""
    assert found_by({"eps": 0.9 * BEFORE, "bias": 0.5 * BEFORE, "scale": BEFORE}) == []
    assert found_by({"eps": 0.9 * BEFORE, "bias": 0.2 * BEFORE}) == ["bias"]


def test_what_comes_near_is_not_listed_beside_what_reaches() -> None:
    assert found_by({"near": 0.05, "right": 1e-3}, before=1.0) == ["right"]
    assert found_by({"near": 0.05, "far": 0.2}, before=1.0) == ["near"]


@pytest.mark.parametrize("later", [("layers.1.mlp", 1, 0), ("layers.0.mlp", 0, 1)], ids=["layer", "step"])
def test_what_comes_later_does_not_explain_the_first(
    later: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding("norm_eps", 1.0, 0.0, "")
    first, known = divergence("layers.0.attention", 0, 0), divergence(*later)
    monkeypatch.setattr(search, "explain", lambda one, *_: [finding] if one is known else [])
    nothing: Any = None
    assert search.explain_first([first, known], nothing, nothing) is None
    assert search.explain_first([first, known, first], nothing, nothing) is None
    assert search.explain_first([known], nothing, nothing) == (known, [finding])
