"""Opens the side that a spec names.

Owns the choice between an engine and Hugging Face's class; either is imported when it is opened. Knows
nothing of what a side is asked.

    open_side(SideSpec(path="engines/pocket-chat"))
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing

from ingot.compare.spec import HUGGINGFACE
from ingot.evaluate.side import Side, SideSpec


def open_side(spec: SideSpec) -> AbstractContextManager[Side]:
    """Load what the spec names; leaving the block frees it.

    Raises:
        IngotError: it cannot be loaded.
    """
    if spec.kind == HUGGINGFACE:
        from ingot.evaluate.huggingface import HuggingFaceSide

        return closing(HuggingFaceSide(spec))
    from ingot.evaluate.ingot_side import IngotSide

    return closing(IngotSide(spec))
