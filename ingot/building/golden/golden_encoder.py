"""The encoder's part of a golden proof: inputs, checksums of what it makes of them, and noise floors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from ingot.building.golden.golden_pictures import exact_pixels, golden_values
from ingot.building.golden.golden_speech import HOP, exact_log_mel, golden_samples
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.config.modality import PICTURE, SPEECH, Modality
from ingot.engine.proof_file import SPLIT, InputClaim
from ingot.engine.reference_encoder import encode, encoder_stages
from ingot.engine.reference_run import ReferenceRun
from ingot.engine.sketch import Checksum, Sketch, distance, rounded
from ingot.errors import ConfigError
from ingot.models.model_registry import plain_encoder
from ingot.reference.plain_stage import Passage

_FRAMES_OF_A_POSITION = 2
_NUDGE = 1000  # of so many values a resize may round one to the other level


@dataclass(frozen=True)
class GoldenInput(ABC):
    """An input that is the same everywhere, and its features in float64.

    Attributes:
        name: what its values follow from, with the size.
        size: of the values.
        shape: of the features, as the encoder takes them; 0: given by the size.
    """

    name: str
    size: tuple[int, ...]
    shape: tuple[int, ...]

    features_name: ClassVar[str]  # in reports

    @staticmethod
    @abstractmethod
    def sizes(encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
        """The sizes that a model is proven with, by name: several, so that requests beside each other read
        different ones. Where outputs are spliced into the prompt, each has ``max_positions`` of them.
        """

    @property
    @abstractmethod
    def features(self) -> torch.Tensor:
        """As the encoder takes them, float64."""

    @property
    @abstractmethod
    def nearly(self) -> torch.Tensor:
        """The same with what a sound preparation may round otherwise."""

    @abstractmethod
    def rows(self, features: torch.Tensor) -> torch.Tensor:
        """Features as rows whose checksum is kept."""

    @property
    def floor(self) -> float:
        """What rounding does to the features, relative."""
        off = distance(self.rows(self.nearly), self.rows(self.features))
        return rounded(max(off, torch.finfo(torch.float32).eps))

    def checksum(self, features: torch.Tensor) -> Checksum:
        return Sketch(self.features_name).add(self.rows(features), first=0).checksum()


class GoldenSpeech(GoldenInput):
    """``samples``: float32 [N]; features are log-mel [mels, frames]."""

    features_name = "log-mel"

    @staticmethod
    def sizes(encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
        """A whole window and a third of one."""
        frames = _FRAMES_OF_A_POSITION * encoder.max_positions
        return {"whole": (HOP * frames,), "third": (HOP * max(frames // 3, _FRAMES_OF_A_POSITION),)}

    @cached_property
    def samples(self) -> torch.Tensor:
        return golden_samples(self.name, self.size[0])

    @cached_property
    def features(self) -> torch.Tensor:
        return exact_log_mel(self.samples, self.shape[0])

    @property
    def nearly(self) -> torch.Tensor:
        return exact_log_mel(self.samples, self.shape[0], torch.float32)

    def rows(self, features: torch.Tensor) -> torch.Tensor:
        return features.T


class GoldenPicture(GoldenInput):
    """``values``: uint8 [height, width, 3]; features are pixels [3, side, side]."""

    features_name = "pixels"

    @staticmethod
    def sizes(encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
        """One at the encoder's size and a wide one, which is resized."""
        side = encoder.features[-1]
        return {"square": (side, side), "wide": (side + side // 2, 2 * side)}

    @cached_property
    def values(self) -> np.ndarray:
        return golden_values(self.name, (self.size[0], self.size[1]))

    @cached_property
    def features(self) -> torch.Tensor:
        return exact_pixels(self.values, self.shape[-1])

    @property
    def nearly(self) -> torch.Tensor:
        resized = self.size != self.shape[1:]
        return exact_pixels(self.values, self.shape[-1], torch.float32, nudge=_NUDGE if resized else 0)

    def rows(self, features: torch.Tensor) -> torch.Tensor:
        return features.flatten(0, 1)


GOLDEN_INPUTS: dict[Modality, type[GoldenInput]] = {SPEECH: GoldenSpeech, PICTURE: GoldenPicture}


def register_golden_inputs(modality: Modality, kind: type[GoldenInput]) -> None:
    """Prove models of a modality with inputs of ``kind``; ValueError where it has golden inputs."""
    if modality in GOLDEN_INPUTS:
        raise ValueError(f"modality {modality.name} has golden inputs already")
    GOLDEN_INPUTS[modality] = kind


def golden_inputs(config: DecoderConfig) -> list[GoldenInput]:
    """The inputs that a model is proven with; none of a model whose encoder no proof computes.

    Raises ConfigError where its modality has none.
    """
    encoder = config.encoder
    if encoder is None or plain_encoder(config) is None:
        return []
    made = _golden(config)
    return [made(name, size, encoder.features) for name, size in made.sizes(encoder).items()]


def inputs_of(config: DecoderConfig, claims: Sequence[InputClaim]) -> list[GoldenInput]:
    """What a proof's inputs were made of."""
    if config.encoder is None or not claims:
        return []
    return [_golden(config)(one.name, one.size, config.encoder.features) for one in claims]


def _golden(config: DecoderConfig) -> type[GoldenInput]:
    if config.modality not in GOLDEN_INPUTS:
        raise ConfigError(
            "no golden inputs are registered for this modality, so its encoder cannot be proven",
            seen=config.modality.name,
            allowed=[one.name for one in GOLDEN_INPUTS],
            fix="register_golden_inputs, or a build without a proof",
        )
    return GOLDEN_INPUTS[config.modality]


def claimed(run: ReferenceRun, number: int, given: GoldenInput) -> InputClaim:
    """Encode an input in ``run``, which keeps it, and return what was computed."""
    modules: dict[str, Checksum] = {}

    def see(name: str, output: torch.Tensor) -> None:
        modules[name] = Sketch(name).add(output, first=0).checksum()

    encode(run, number, given.features, see)
    return InputClaim(given.name, given.size, given.checksum(given.features), given.floor, modules)


def finer(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each arithmetic except for the first, fp64, and the one that it is compared with."""
    return ((name, "fp64" if name in ("fp32", SPLIT) else "fp32") for name in names if name != "fp64")


def encoder_distances(
    runs: Mapping[str, ReferenceRun], inputs: Sequence[GoldenInput]
) -> dict[str, dict[str, float]]:
    """By arithmetic and module, how far a run is from a finer one; the runs keep what they encode."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for number, one in enumerate(inputs):
        seen: dict[str, dict[str, torch.Tensor]] = {name: {} for name in runs}
        stages = {name: encoder_stages(run, number, seen[name].__setitem__) for name, run in runs.items()}
        at = {name: Passage.of(run.features(one.features)) for name, run in runs.items()}
        for place in range(len(stages["fp32"])):
            for name, own in stages.items():
                at[name] = at[name].after(own[place])
            runs["fp32"].weights.release()
            for name, better in finer(runs):
                for module, output in seen[name].items():
                    own_distance = distance(output, seen[better][module])
                    found[name][module] = max(found[name].get(module, 0.0), own_distance)
            for outputs in seen.values():
                outputs.clear()
    return found
