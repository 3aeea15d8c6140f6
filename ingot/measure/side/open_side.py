"""One side, opened by what its spec names.

with open_side(SideSpec("engines/pocket-chat")) as side: side.logits(ids)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ingot.measure.side.class_side import HuggingFaceSide
from ingot.measure.side.huggingface import check_huggingface
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec, longest

Say = Callable[[str], None]
Side = IngotSide | HuggingFaceSide


def silent(text: str) -> None: ...


def open_side(spec: SideSpec) -> Side:
    """Load what the spec names; leaving a ``with`` block frees it."""
    return HuggingFaceSide(spec) if spec.kind == HUGGINGFACE else IngotSide(spec)


def check_classes(specs: Iterable[SideSpec]) -> None:
    """``check_huggingface`` of the specs of its class."""
    for spec in specs:
        if spec.kind == HUGGINGFACE:
            check_huggingface(spec.path)


def check_side(spec: SideSpec) -> None:
    """Raise IngotError early if nothing is there, or Hugging Face's class cannot read it."""
    check_classes([spec])
    longest(spec)
