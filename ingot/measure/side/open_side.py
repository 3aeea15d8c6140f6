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
    """Load what the spec names; leaving a ``with`` block frees it.

    Raises:
        IngotError: it cannot be loaded, or transformers is missing.
    """
    return HuggingFaceSide(spec) if spec.kind == HUGGINGFACE else IngotSide(spec)


def check_classes(specs: Iterable[SideSpec]) -> None:
    """Say early what would only fail once the turn of Hugging Face's class comes.

    Raises:
        DeviceError, CheckpointError: as ``check_huggingface``.
    """
    for spec in specs:
        if spec.kind == HUGGINGFACE:
            check_huggingface(spec.path)


def check_side(spec: SideSpec) -> None:
    """Say early what would only fail once this side's turn comes.

    Raises:
        IngotError: nothing is there, or Hugging Face's class cannot read it.
    """
    check_classes([spec])
    longest(spec)
