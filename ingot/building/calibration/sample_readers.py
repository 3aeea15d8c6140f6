"""What a build calibrates with, by a model's modality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ingot.building.calibration import speech_samples
from ingot.building.calibration.calibration_data import CalibrationData, SampleFile, read_calibration_data
from ingot.building.calibration.calibration_rows import holds_rows, read_calibration_rows
from ingot.building.calibration.picture_samples import read_pictures
from ingot.config.modality import PICTURE, SPEECH, TEXT, Modality
from ingot.errors import ConfigError


@dataclass(frozen=True)
class SampleReader:
    """How samples of a modality are read.

    Attributes:
        read: the samples of a file.
        shapes: what a file may be, for messages.
        draws: whether ``prompt_seed`` draws questions.
    """

    read: Callable[[SampleFile], CalibrationData]
    shapes: str
    draws: bool = False


def register_samples(modality: Modality, reader: SampleReader) -> None:
    """Read samples of a modality by ``reader``; ValueError where it has one."""
    if modality in SAMPLE_READERS:
        raise ValueError(f"modality {modality.name} has a reader of samples already")
    SAMPLE_READERS[modality] = reader


def reader_of(modality: Modality) -> SampleReader:
    """What reads a modality's samples; ConfigError where it has no calibration samples."""
    if modality not in SAMPLE_READERS:
        raise ConfigError(
            "no calibration samples are read for this modality",
            seen=modality.model,
            allowed=[one.model for one in SAMPLE_READERS],
            field="quant",
            fix="`quant` without a method that calibrates",
        )
    return SAMPLE_READERS[modality]


def read_samples(given: SampleFile) -> CalibrationData:
    """At most ``count`` samples, each as long as the build takes: embeddings of a model that takes text, else
    what its modality's reader finds. Raises ConfigError where no questions are drawn for a seed.
    """
    config = given.config
    reader = reader_of(config.modality)
    if given.prompt_seed is not None and not reader.draws:
        raise ConfigError(
            "only questions about pictures are drawn",
            seen=config.modality.model,
            field="calib_prompt_seed",
            fix="leave out `calib_prompt_seed`",
        )
    if config.modality.takes_text and holds_rows(given.path):
        rows = read_calibration_rows(given.path, config.hidden_size, samples=given.count, length=given.length)
        return rows if config.encoder is None else replace(rows, features=(None,) * len(rows.samples))
    return reader.read(given)


SAMPLE_READERS: dict[Modality, SampleReader] = {
    TEXT: SampleReader(
        lambda given: read_calibration_data(
            given.path, given.text.tokenizer, given.text.chat, samples=given.count, length=given.length
        ),
        "a .txt, .json or .jsonl file of texts, conversations or token_ids, or .npy of embeddings",
    ),
    SPEECH: SampleReader(
        speech_samples.read_speech, f"a manifest or folder of recordings: {speech_samples.SHAPES}"
    ),
    PICTURE: SampleReader(
        lambda given: read_pictures(
            given.path, given.count, given.length, given.config, given.text, given.prompt_seed
        ),
        "pictures with captions: a .jsonl file, or a folder with filter_cap.json and image/",
        draws=True,
    ),
}
