"""The encoder's part of a golden proof.

Owns which speech a model is proven with, checksums of what its encoder makes of it, and its noise floors.
Knows no prompt.

    speech = golden_speech(model.config)                 # empty: the model does not hear
    inputs = [heard(run, number, one) for number, one in enumerate(speech)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ingot.config.model import DecoderConfig
from ingot.engine.golden_speech import HOP, exact_log_mel, golden_samples
from ingot.engine.proof import Heard
from ingot.engine.reference import ReferenceRun
from ingot.engine.reference_encoder import encode, encoder_stages, plain_encoder
from ingot.engine.sketch import Checksum, Sketch, distance, rounded

LOG_MEL = "log-mel"
_FRAMES_OF_A_POSITION = 2


@dataclass(frozen=True)
class Speech:
    """An input by name: float32 samples [N], and its features [mels, frames] in float64."""

    name: str
    samples: torch.Tensor
    features: torch.Tensor

    @classmethod
    def of(cls, name: str, samples: int, mels: int) -> Speech:
        """The speech of that name, the same everywhere."""
        made = golden_samples(name, samples)
        return cls(name, made, exact_log_mel(made, mels))


def golden_speech(config: DecoderConfig) -> list[Speech]:
    """A whole window, and a third of one, so that requests beside each other read different inputs."""
    if config.encoder is None or plain_encoder(config) is None:
        return []
    frames = _FRAMES_OF_A_POSITION * config.encoder.max_positions
    parts = {"whole": frames, "third": max(frames // 3, _FRAMES_OF_A_POSITION)}
    return [Speech.of(name, HOP * count, config.encoder.features[0]) for name, count in parts.items()]


def speech_of(inputs: Sequence[Heard]) -> list[Speech]:
    """What a proof's inputs were made of."""
    return [Speech.of(one.name, one.samples, one.features.size) for one in inputs]


def heard(run: ReferenceRun, number: int, speech: Speech) -> Heard:
    """Encode an input in ``run``, which keeps it, and tell what came of it."""
    modules: dict[str, Checksum] = {}

    def see(name: str, output: torch.Tensor) -> None:
        modules[name] = Sketch(name).add(output, first=0).checksum()

    encode(run, number, speech.features, see)
    exact = speech.features.T
    fp32 = exact_log_mel(speech.samples, len(speech.features), torch.float32).T
    floor = rounded(max(distance(fp32, exact), torch.finfo(torch.float32).eps))
    return Heard(speech.name, len(speech.samples), mel_checksum(speech.features), floor, modules)


def mel_checksum(features: torch.Tensor) -> Checksum:
    """Of log-mel features [mels, frames]."""
    return Sketch(LOG_MEL).add(features.T, first=0).checksum()


def finer(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each arithmetic but the first, fp64, and the one that it is compared with."""
    return ((name, "fp64" if name == "fp32" else "fp32") for name in names if name != "fp64")


def encoder_distances(
    runs: Mapping[str, ReferenceRun], speech: Sequence[Speech]
) -> dict[str, dict[str, float]]:
    """By arithmetic and module, how far a run is from a finer one; the runs keep what they encode."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for number, one in enumerate(speech):
        seen: dict[str, dict[str, torch.Tensor]] = {name: {} for name in runs}
        stages = {name: encoder_stages(run, number, seen[name].__setitem__) for name, run in runs.items()}
        hidden = {name: run.features(one.features) for name, run in runs.items()}
        for place in range(len(stages["fp32"])):
            for name, own in stages.items():
                hidden[name] = own[place](hidden[name])
            runs["fp32"].weights.release()
            for name, better in finer(runs):
                for module, output in seen[name].items():
                    own_distance = distance(output, seen[better][module])
                    found[name][module] = max(found[name].get(module, 0.0), own_distance)
            for outputs in seen.values():
                outputs.clear()
    return found
