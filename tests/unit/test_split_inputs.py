"""What a CPU's products read of their inputs: by which columns they are rounded to 23 bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ingot.engine import split_inputs
from ingot.engine.split_inputs import split_feed

X = torch.tensor([[2.0**20, 0.3, 0.3, 0.3]])


def layer(columns: int, *, ordered: bool = False) -> SimpleNamespace:
    return SimpleNamespace(origin=SimpleNamespace(columns=columns, ordered=ordered), in_features=4)


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_inputs, "linears", lambda model: model)
    monkeypatch.setattr(split_inputs, "split_columns", lambda origin, features: origin.columns)


def test_columns_beside_one_another_in_the_layer_s_own_order() -> None:
    """Beside 2^20 a value is a multiple of a half."""
    weights = {"ordered.order": torch.tensor([0, 2, 1, 3], dtype=torch.int32)}
    layers = {"plain": layer(2), "ordered": layer(2, ordered=True), "dense": layer(0)}
    feed = split_feed(layers, weights)  # type: ignore[arg-type]
    assert feed is not None
    for name, coarse in (("plain", [1]), ("ordered", [2]), ("dense", [])):
        found = feed(name, X)[0].tolist()
        assert [at for at, value in enumerate(found) if value == 0.5] == coarse, name
        assert all(abs(value - 0.3) < 1e-6 for at, value in enumerate(found) if at and at not in coarse)
    assert feed("dense", X) is X


def test_a_model_without_such_products_has_no_feed() -> None:
    assert split_feed({"dense": layer(0)}, {}) is None  # type: ignore[arg-type]
