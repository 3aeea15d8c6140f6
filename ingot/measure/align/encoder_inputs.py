"""What both sides of a comparison are given beside token ids.

Owns the pair of an input and its features, and how each shows the features in its file. Knows no model.

    given = Given(golden, features)             # features as the original makes them, float64
    given.shown(given.features)                 # rows, as a stage
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.building.golden.golden_encoder import GoldenInput


@dataclass(frozen=True, eq=False)
class Given:
    """An input that is the same everywhere.

    Attributes:
        source: what it is made of.
        features: as the original makes them and the encoder takes them.
    """

    source: GoldenInput
    features: torch.Tensor

    @property
    def stage(self) -> str:
        """What a file calls the features."""
        return self.source.features_name.replace("-", "_")

    def shown(self, features: torch.Tensor) -> torch.Tensor:
        """Features as the rows of a stage."""
        return self.source.rows(features)

    @property
    def nearly(self) -> torch.Tensor:
        """The features with what a sound preparation may round otherwise."""
        return self.source.nearly
