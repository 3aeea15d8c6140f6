"""What a checkpoint is measured on: running text, recordings with transcripts, pictures with captions.

Owns the choice between them by the kind of model, and the exact numbers that a record tells. Knows no passes.

    data = read_data(path, needs=needs_of("checkpoint", path))
    samples = samples_of(source, config, data, reading)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.audio.librispeech import librispeech
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.config.decoder_config import DecoderConfig
from ingot.config.modality import PICTURE, SPEECH, TEXT
from ingot.engine.engine_text import read_text_parts
from ingot.errors import ConfigError
from ingot.image.picture_folder import picture_records
from ingot.measure.evaluate.data_file import DataFile, OfFolder
from ingot.measure.evaluate.data_item import DataItem
from ingot.measure.evaluate.doctor.caption_texts import captioned, captioned_texts
from ingot.measure.evaluate.doctor.precision_probe import Text
from ingot.measure.evaluate.doctor.transcript_texts import one_window, spoken_texts
from ingot.measure.evaluate.perplexity import WindowSettings, counts_of, prepare
from ingot.measure.evaluate.token_divergence import DEFAULT_WINDOW
from ingot.measure.side.side_spec import SideSpec, model_of, most_tokens
from ingot.speech.window_decoding import Vocabulary


@dataclass(frozen=True)
class Samples:
    """As a probe reads them, exact numbers, and how they were read."""

    texts: list[Text]
    counts: dict[str, Any]
    reading: WindowSettings


def needs_of(checkpoint: str, data: Path) -> Callable[[DataItem], str | None]:
    """Why an item of a file does not serve a checkpoint: a model of speech needs recordings with transcripts,
    a model of pictures needs pictures with captions.

    Raises:
        IngotError: the checkpoint cannot be read.
    """
    config = model_of(checkpoint)
    return _KINDS[config.modality].needs(data if data.is_dir() else data.parent, config)


def records_of(checkpoint: str) -> OfFolder:
    """How a folder of data is read for a checkpoint.

    Raises:
        IngotError: the checkpoint cannot be read.
    """
    return _KINDS[model_of(checkpoint).modality].records


def samples_of(source: Checkpoint, config: DecoderConfig, data: DataFile, reading: WindowSettings) -> Samples:
    """The items of a file as this model reads them.

    Raises:
        ConfigError: an item does not serve, or the reading does not fit the model.
        RequestError: a recording or a picture cannot be read.
    """
    return _KINDS[config.modality].samples(source, config, data, reading)


def check_ids(item: DataItem, ids: Sequence[int], vocab: int) -> None:
    """Raises:
    ConfigError: an id of an item is not the model's.
    """
    odd = next((i for i in ids if not 0 <= i < vocab), None)
    if odd is not None:
        raise ConfigError(
            f"item {item.number} has a token id outside the vocabulary",
            seen=odd,
            allowed=f"0 to {vocab - 1}",
            field="data",
        )


def _written(source: Checkpoint, config: DecoderConfig, data: DataFile, reading: WindowSettings) -> Samples:
    """Every window as a text of its own, its counted places those of a divergence."""
    spec = SideSpec(str(source.folder))
    reading, documents, short = prepare([spec], data, reading, DEFAULT_WINDOW, apart=True)
    texts = []
    for document in documents:
        check_ids(document.item, document.ids, config.vocab_size)
        for window in document.windows:
            counted = range(window.counted.start, window.counted.stop)
            texts.append(Text(tuple(document.ids[window.begin : window.end]), counted))
    return Samples(texts, counts_of(documents, short), reading)


def _captioned(source: Checkpoint, config: DecoderConfig, data: DataFile, reading: WindowSettings) -> Samples:
    """Every caption as the answer to a question about its picture."""
    if reading.window is not None:
        seen = f"window {reading.window}"
        raise ConfigError(
            "a caption is read whole", seen=seen, field="max_tokens", fix="`max_tokens` instead of `window`"
        )
    room = most_tokens(SideSpec(str(source.folder)), config)
    texts = captioned_texts(data, read_text_parts(source), config, reading.max_tokens, room)
    return Samples(texts, _counts(texts), reading)


def _spoken(source: Checkpoint, config: DecoderConfig, data: DataFile, reading: WindowSettings) -> Samples:
    """Every transcript as a text that follows from its recording."""
    if reading.window is not None:
        seen = f"window {reading.window}"
        raise ConfigError(
            "a transcript is read whole",
            seen=seen,
            field="max_tokens",
            fix="`max_tokens` instead of `window`",
        )
    tokenizer = read_text_parts(source).tokenizer
    vocabulary = Vocabulary.of_model(config, tokenizer, config.max_positions, source.generation_config)
    texts = spoken_texts(data, vocabulary, config, reading.max_tokens)
    for item, text in zip(data.items, texts, strict=True):
        check_ids(item, text.ids, config.vocab_size)
    return Samples(texts, _counts(texts), reading)


def _counts(texts: Sequence[Text]) -> dict[str, Any]:
    counted = sum(len(text.counted) for text in texts)
    return {"documents": len(texts), "tokens": sum(len(t.ids) for t in texts), "counted_tokens": counted}


@dataclass(frozen=True)
class _Kind:
    """What a kind of model is measured on: which items serve, how a folder is read, and the samples."""

    needs: Callable[[Path, DecoderConfig], Callable[[DataItem], str | None]]
    records: OfFolder
    samples: Callable[[Checkpoint, DecoderConfig, DataFile, WindowSettings], Samples]


_KINDS = {
    TEXT: _Kind(lambda folder, config: lambda item: None, librispeech, _written),
    SPEECH: _Kind(one_window, librispeech, _spoken),
    PICTURE: _Kind(lambda folder, config: captioned(folder), picture_records, _captioned),
}
