"""Opens the side that a spec names.

Owns the choice between an engine and Hugging Face's class; either is imported when it is opened. Knows
nothing of what a side is measured.

    open_side(SideSpec(path="engines/pocket-chat"))
"""

from __future__ import annotations

from ingot.bench.side import Side, SideSpec
from ingot.compare.spec import HUGGINGFACE


def open_side(spec: SideSpec) -> Side:
    """Load what the spec names.

    Raises:
        IngotError: it cannot be loaded, or transformers is missing.
    """
    if spec.kind == HUGGINGFACE:
        from ingot.bench.huggingface import HuggingFaceSide

        return HuggingFaceSide(spec)
    from ingot.bench.ingot_side import IngotSide

    return IngotSide(spec)
