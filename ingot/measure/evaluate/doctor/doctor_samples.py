"""What a checkpoint is measured on, by its modality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.audio.librispeech import librispeech
from ingot.audio.log_mel import HOP
from ingot.audio.recording_samples import RATE, audio_seconds, read_audio
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.config.decoder_config import DecoderConfig
from ingot.config.modality import PICTURE, SPEECH, TEXT
from ingot.config.picture_config import PictureFeatures
from ingot.engine.engine_text import TextParts, read_text_parts
from ingot.errors import ConfigError
from ingot.image.image_reader import PictureReader
from ingot.image.picture_folder import picture_records
from ingot.measure.evaluate.data_file import DataFile, OfFolder
from ingot.measure.evaluate.data_item import DataItem
from ingot.measure.evaluate.doctor.precision_probe import Text
from ingot.measure.evaluate.eval_prompts import need_chat, need_tokenizer
from ingot.measure.evaluate.perplexity import WindowSettings, counts_of, prepare
from ingot.measure.evaluate.scored_captions import QUESTION, picture_check
from ingot.measure.evaluate.scored_transcripts import recording_check
from ingot.measure.evaluate.token_divergence import DEFAULT_WINDOW
from ingot.measure.side.side_spec import SideSpec, model_of, most_tokens
from ingot.speech.recording_features import first_window, window_frames
from ingot.speech.window_decoding import Vocabulary
from ingot.text.languages import language_code
from ingot.text.prompt import Input


@dataclass(frozen=True)
class Samples:
    """Texts for a probe, exact numbers, and how the texts were read."""

    texts: list[Text]
    counts: dict[str, Any]
    reading: WindowSettings


def needs_of(checkpoint: str, data: Path) -> Callable[[DataItem], str | None]:
    """Why a checkpoint cannot use an item: a speech model needs recordings with transcripts, a model of
    pictures needs pictures with captions.
    """
    config = model_of(checkpoint)
    return _KINDS[config.modality].needs(data if data.is_dir() else data.parent, config)


def records_of(checkpoint: str) -> OfFolder:
    """How a folder of data is read for a checkpoint."""
    return _KINDS[model_of(checkpoint).modality].records


def samples_of(source: Checkpoint, config: DecoderConfig, data: DataFile, reading: WindowSettings) -> Samples:
    """The items of a file as this model reads them."""
    kind = _KINDS[config.modality]
    if kind.read_whole and reading.window is not None:
        raise ConfigError(
            f"{kind.read_whole} is read whole",
            seen=f"window {reading.window}",
            field="max_tokens",
            fix="`max_tokens` instead of `window`",
        )
    return kind.samples(source, config, data, reading)


def check_ids(item: DataItem, ids: Sequence[int], vocab: int) -> None:
    """Raise ConfigError if an item has an id outside the vocabulary."""
    odd = next((i for i in ids if not 0 <= i < vocab), None)
    if odd is not None:
        raise ConfigError(
            f"item {item.number} has a token id outside the vocabulary",
            seen=odd,
            allowed=f"0 to {vocab - 1}",
            field="data",
        )


def _written(source: Checkpoint, config: DecoderConfig, data: DataFile, reading: WindowSettings) -> Samples:
    """Every window as a text of its own, with the counted positions of a divergence."""
    spec = SideSpec(str(source.path))
    reading, documents, short = prepare([spec], data, reading, DEFAULT_WINDOW, apart=True)
    texts = []
    for document in documents:
        check_ids(document.item, document.ids, config.vocab_size)
        for window in document.windows:
            counted = range(window.counted.start, window.counted.stop)
            texts.append(Text(tuple(document.ids[window.begin : window.end]), counted))
    return Samples(texts, counts_of(documents, short), reading)


def _captioned(source: Checkpoint, config: DecoderConfig, data: DataFile, reading: WindowSettings) -> Samples:
    room = most_tokens(SideSpec(str(source.path)), config)
    texts = captioned_texts(data, read_text_parts(source), config, reading.max_tokens, room)
    return Samples(texts, _counts(texts), reading)


def captioned_texts(
    data: DataFile, text: TextParts, config: DecoderConfig, most: int | None, room: int
) -> list[Text]:
    """The question about each picture with placeholders, then at most ``most`` tokens of its first caption
    (None: all), in all at most ``room``. The caption's tokens and the end token count.
    """
    encoder, tokenizer, chat = config.encoder, need_tokenizer(text), need_chat(text.chat)
    assert encoder is not None
    wanted = PictureFeatures(encoder.features[-1])
    content = [{"type": "input", "input": Input(None)}, {"type": "text", "text": QUESTION}]
    prompt: list[int] = []
    for piece in chat.prompt_pieces([{"role": "user", "content": content}], tokenizer):
        prompt += [encoder.placeholder_id] * config.placeholders if isinstance(piece, Input) else piece
    texts = []
    with PictureReader() as reader:
        for item in data.items:
            caption = tokenizer.encode(item.references[0], add_special_tokens=False, parse_special=False)
            ids = (*prompt, *caption[:most])
            _check_length(f"the caption of item {item.number}", ids, room, " with its picture")
            pixels = reader.read(data.folder / (item.image or ""), wanted.side).pixels(wanted)
            texts.append(Text(ids, range(len(prompt) - 1, len(ids)), pixels))
    return texts


def _spoken(source: Checkpoint, config: DecoderConfig, data: DataFile, reading: WindowSettings) -> Samples:
    """Start, language and task, then each transcript without timestamps, whose tokens and end token count."""
    tokenizer = read_text_parts(source).tokenizer
    vocabulary = Vocabulary.of_model(config, tokenizer, config.max_positions, source.generation_config)
    why = _one_window(data.folder, config)
    texts = []
    for item in data.items:
        reason = why(item)
        if reason is not None:
            raise ConfigError(
                f"item {item.number} cannot be used", seen=reason, field="data", fix="`data`, or `skip_bad`"
            )
        if item.language is None and vocabulary.tokens.multilingual:
            raise ConfigError(
                f"item {item.number} does not say its language",
                seen=item.audio,
                allowed='{"audio": "…", "text": "…", "language": "en"}',
                field="data",
            )
        language = None if item.language is None else language_code(item.language)
        prompt = vocabulary.tokens.prompt(language, "transcribe", timestamps=False)
        ids = (*prompt, *vocabulary.ids(item.text or "")[: reading.max_tokens])
        _check_length(f"the transcript of item {item.number}", ids, vocabulary.longest)
        check_ids(item, ids, config.vocab_size)
        features = first_window(read_audio(data.folder / (item.audio or "")), config)
        texts.append(Text(ids, range(len(prompt) - 1, len(ids)), features))
    return Samples(texts, _counts(texts), reading)


def _counts(texts: Sequence[Text]) -> dict[str, Any]:
    counted = sum(len(text.counted) for text in texts)
    return {"documents": len(texts), "tokens": sum(len(t.ids) for t in texts), "counted_tokens": counted}


def _check_length(what: str, ids: Sequence[int], room: int, beside: str = "") -> None:
    if len(ids) > room:
        raise ConfigError(
            f"{what} is longer than the model's context",
            seen=f"{len(ids)} tokens{beside}",
            allowed=room,
            field="max_tokens",
        )


def _with_caption(folder: Path, config: DecoderConfig) -> Callable[[DataItem], str | None]:
    """Why an item cannot be used: it needs a picture, relative to ``folder``, and a caption."""
    check = picture_check(folder)

    def why(item: DataItem) -> str | None:
        found = check(item)
        return "a picture without a caption" if found is None and not item.references else found

    return why


def _one_window(folder: Path, config: DecoderConfig) -> Callable[[DataItem], str | None]:
    """Why an item cannot be used: its recording, relative to ``folder``, must fit one window."""
    check, seconds = recording_check(folder), window_frames(config) * HOP / RATE

    def why(item: DataItem) -> str | None:
        found = check(item)
        if found is not None:
            return found
        took = audio_seconds(folder / (item.audio or ""))
        return f"the recording takes {took:.1f} s, a window {seconds:g} s" if took > seconds else None

    return why


@dataclass(frozen=True)
class _Kind:
    """Which items a model of this kind can use, how a folder is read, and the samples."""

    needs: Callable[[Path, DecoderConfig], Callable[[DataItem], str | None]]
    records: OfFolder
    samples: Callable[[Checkpoint, DecoderConfig, DataFile, WindowSettings], Samples]
    read_whole: str = ""  # what messages call a text that has no windows


_KINDS = {
    TEXT: _Kind(lambda folder, config: lambda item: None, librispeech, _written),
    SPEECH: _Kind(_one_window, librispeech, _spoken, "a transcript"),
    PICTURE: _Kind(_with_caption, picture_records, _captioned, "a caption"),
}
