"""What products read on a CPU that rounds their inputs to 23 bits (quant/schemes/in_panels.py).

run = ReferenceRun(model, weights, arithmetic, feed=split_feed(model, weights))
"""

from __future__ import annotations

import torch

from ingot.engine.reference_run import Feed, WeightSource
from ingot.layers.decoder import Decoder
from ingot.layers.linear import linears
from ingot.quant.plain_rows import split_rows
from ingot.quant.schemes.in_panels import split_columns


def split_feed(model: Decoder, weights: WeightSource) -> Feed | None:
    """What a product reads there of its input [..., K]; None: the model has no such products."""
    columns = {name: split_columns(one.origin, one.in_features) for name, one in linears(model).items()}
    ordered = {name for name, one in linears(model).items() if columns[name] and one.origin.ordered}

    def feed(name: str, x: torch.Tensor) -> torch.Tensor:
        if not columns[name]:
            return x
        return split_rows(x, columns[name], weights[f"{name}.order"] if name in ordered else None)

    return feed if any(columns.values()) else None
