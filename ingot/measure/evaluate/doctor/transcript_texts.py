"""Recordings with their transcripts, as a speech model is trained on them.

Owns which recordings serve, and the prompt and the features of each. Knows no passes.

    data = read_data(path, needs=one_window(path.parent, config))
    texts = spoken_texts(data, vocabulary, config, most=2048)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ingot.audio.log_mel import HOP
from ingot.audio.recording_samples import RATE, audio_seconds, read_audio
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.data_item import DataItem
from ingot.measure.evaluate.doctor.precision_probe import Text
from ingot.measure.evaluate.scored_transcripts import recording_check
from ingot.speech.recording_features import first_window, window_frames
from ingot.speech.window_decoding import Vocabulary
from ingot.text.languages import language_code


def one_window(folder: Path, config: DecoderConfig) -> Callable[[DataItem], str | None]:
    """Why an item does not serve: its recording, named from ``folder`` on, must be of one window."""
    check, seconds = recording_check(folder), window_frames(config) * HOP / RATE

    def why(item: DataItem) -> str | None:
        found = check(item)
        if found is not None:
            return found
        took = audio_seconds(folder / (item.audio or ""))
        return f"the recording takes {took:.1f} s, a window {seconds:g} s" if took > seconds else None

    return why


def spoken_texts(
    data: DataFile, vocabulary: Vocabulary, config: DecoderConfig, most: int | None
) -> list[Text]:
    """Start, language and task, then at most ``most`` tokens of each transcript (None: all), without
    timestamps; what counts is expected from the last token of the prompt on, the end token included.

    Raises:
        ConfigError: an item does not serve, or its transcript is too long.
        RequestError: a recording cannot be read, or the model does not know its language.
    """
    why = one_window(data.folder, config)
    found = []
    for item in data.items:
        reason = why(item)
        if reason is not None:
            raise ConfigError(
                f"item {item.number} cannot be used", seen=reason, field="data", fix="`data`, or `skip_bad`"
            )
        prompt = vocabulary.tokens.prompt(_language(item, vocabulary), "transcribe", timestamps=False)
        ids = [*prompt, *vocabulary.ids(item.text or "")[:most]]
        if len(ids) > vocabulary.longest:
            raise ConfigError(
                f"the transcript of item {item.number} is longer than the model's context",
                seen=f"{len(ids)} tokens",
                allowed=vocabulary.longest,
                field="max_tokens",
            )
        features = first_window(read_audio(data.folder / (item.audio or "")), config)
        found.append(Text(tuple(ids), range(len(prompt) - 1, len(ids)), features))
    return found


def _language(item: DataItem, vocabulary: Vocabulary) -> str | None:
    """Its code; a model of English alone asks for none.

    Raises:
        ConfigError: a model of many languages does not know which.
    """
    if item.language is None and vocabulary.tokens.multilingual:
        raise ConfigError(
            f"item {item.number} does not say its language",
            seen=item.audio,
            allowed='{"audio": "…", "text": "…", "language": "en"}',
            field="data",
        )
    return None if item.language is None else language_code(item.language)
