"""A modality from outside the package: a series, float [N, C], whose values a request brings itself.

Covers its golden inputs and its calibration samples; what encodes them is dummy_series.py's.

    register()
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property

import torch

from ingot.building.calibration.calibration_data import CalibrationData, SampleFile
from ingot.building.calibration.sample_readers import SampleReader, register_samples
from ingot.building.golden.golden_encoder import GoldenInput, register_golden_inputs
from ingot.config.encoder_config import EncoderConfig
from ingot.config.modality import Modality, register_modality

SERIES = Modality("series", "a model of series and text")


class GoldenSeries(GoldenInput):
    """``size``: (N,); features are the series itself, [N, C]."""

    features_name = "series"

    @staticmethod
    def sizes(encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
        """Two of the longest: golden cases have as many placeholders as an input may have."""
        return {"one": (encoder.max_positions,), "other": (encoder.max_positions,)}

    @cached_property
    def features(self) -> torch.Tensor:
        """The bits of SHAKE-256(name), -1 to 1."""
        count = self.size[0] * self.shape[1]
        data = hashlib.shake_256(f"series/{self.name}".encode()).digest(count)
        values = torch.tensor(list(data), dtype=torch.float64) / 127.5 - 1
        return values.view(self.size[0], self.shape[1])

    @property
    def nearly(self) -> torch.Tensor:
        """In float32, as requests bring it."""
        return self.features.float()

    def rows(self, features: torch.Tensor) -> torch.Tensor:
        """Its steps."""
        return features


def _read(given: SampleFile) -> CalibrationData:
    """Of records ``{"series": [[…]], "token_ids": […]}``, one a line; the series stands first."""
    raw = given.path.read_bytes()
    records = [json.loads(line) for line in raw.splitlines()][: given.count]
    encoder = given.config.encoder
    assert encoder is not None
    samples = [[encoder.placeholder_id] * len(one["series"]) + one["token_ids"] for one in records]
    return CalibrationData(
        path=given.path,
        samples=tuple(samples),
        records=len(records),
        sha256=hashlib.sha256(raw).hexdigest(),
        features=tuple(torch.tensor(one["series"]) for one in records),
    )


def register() -> None:
    """Make the modality known, with what a build needs of it."""
    register_modality(SERIES)
    register_golden_inputs(SERIES, GoldenSeries)
    register_samples(SERIES, SampleReader(_read, '{"series": [[…]], "token_ids": […]}, one a line'))
