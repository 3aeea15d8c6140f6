"""What ``from ingot import …`` gives, of which each is imported when it is first used."""

from __future__ import annotations

import inspect

import pytest

import ingot


@pytest.mark.parametrize("name", ingot.__all__)
def test_a_public_name_is_what_it_is_called(name: str) -> None:
    found = getattr(ingot, name)
    if inspect.isfunction(found) or inspect.isclass(found):
        assert found.__name__ == name
    assert getattr(ingot, name) is found


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match=r"'ingot' has no attribute 'Sampling'"):
        ingot.Sampling  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="Sampling"):
        exec("from ingot import Sampling")
