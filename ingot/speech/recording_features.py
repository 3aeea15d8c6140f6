"""Transcribes a recording window by window (source: OpenAI's Whisper, ``transcribe``)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ingot.audio.log_mel import HOP, RATE, WINDOW, LongLogMel
from ingot.config.decoder_config import DecoderConfig
from ingot.config.modality import SPEECH
from ingot.errors import RequestError
from ingot.speech.hallucination import WindowTimes, seek_behind_words, without_hallucinations
from ingot.speech.segments import Segment, clear_if_empty, end_at, split_window
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.window_decoding import Decoded, DecodeRequest, Vocabulary, decode_window, detect_language
from ingot.speech.word_times import ScoreRequest, TimedWindow, add_words

_FRAMES = WINDOW // HOP
_FRAMES_OF_A_POSITION = 2
_CONFIDENT = 0.5  # above this temperature the next window does not read the text


@dataclass
class Transcript:
    """A recording's transcript. ``duration`` is in seconds; English-only models have no ``language``."""

    segments: list[Segment] = field(default_factory=list)
    language: str | None = None
    language_probability: float | None = None
    duration: float = 0.0

    @property
    def text(self) -> str:
        """The text of all segments."""
        return "".join(segment.text for segment in self.segments)


Request = DecodeRequest | ScoreRequest
Recording = Generator[Request, Any, Transcript]  # answered with an Output, or with Scored
Heads = Sequence[tuple[int, int]]


def transcribe_recording(
    vocabulary: Vocabulary,
    samples: torch.Tensor,
    mels: int,
    options: TranscribeOptions,
    on_segment: Callable[[Segment], None] = lambda segment: None,
    heads: Heads = (),
    device: torch.device | None = None,
) -> Recording:
    """Ask for one window after another.

    Args:
        samples: float32 [N] at 16 kHz.
        on_segment: called with each segment as soon as it is known.
        heads: (layer, head) whose attention times words.
        device: that computes features; None: where the samples are.
    """
    features = LongLogMel(samples, mels, device or samples.device)
    found = Transcript(duration=features.seconds, language=options.language)
    frames = features.num_frames
    if vocabulary.tokens.multilingual and options.language is None and frames:
        probabilities = yield from detect_language(vocabulary, features.window(0, _FRAMES))
        found.language, found.language_probability = next(iter(probabilities.items()))
    previous = _PreviousText(
        [] if options.carry_initial_prompt else vocabulary.ids(options.initial_prompt or "")
    )
    times = [min(round(seconds * RATE / HOP), frames) for seconds in options.clip_timestamps] or [0]
    for start, end in zip(times[::2], [*times[1::2], frames], strict=False):
        seek = start
        while seek < end:
            span = seek, min(seek + _FRAMES, end)
            split, onwards = yield from _window_segments(
                vocabulary, features, span, options, found.language, previous, heads
            )
            for segment in split:
                segment.id, segment.seek = len(found.segments), seek
                found.segments.append(segment)
                on_segment(segment)
            seek += max(onwards, 1)
    return found


def first_window(
    samples: torch.Tensor, config: DecoderConfig, device: torch.device | None = None
) -> torch.Tensor:
    """The features [mels, frames] of a recording's first window, zeros after the end of the recording.

    Args:
        samples: float32 [N] at 16 kHz.
        config: of a speech model.
        device: that computes features; None: where the samples are.
    """
    features = LongLogMel(samples, mel_bins(config), device or samples.device)
    frames = window_frames(config)
    window: torch.Tensor = features.window(0, min(features.num_frames, frames), frames).features
    return window


def window_frames(config: DecoderConfig) -> int:
    """Most frames that a speech encoder takes."""
    assert config.encoder is not None
    return _FRAMES_OF_A_POSITION * config.encoder.max_positions


def mel_bins(config: DecoderConfig) -> int:
    """Mel bins of a model's features; raises ``RequestError`` where it takes no speech."""
    if config.modality is not SPEECH or config.encoder is None:
        seen = f"{config.architecture} ({config.modality.model})"
        raise RequestError(
            "this engine does not take speech", seen=seen, field="engine", fix="an engine of Whisper"
        )
    return config.encoder.features[0]


@dataclass
class _PreviousText:
    """What later windows need of earlier ones: tokens, read from ``read_from`` on, and the end of the last
    word in seconds.
    """

    tokens: list[int]
    read_from: int = 0
    last_end: float = 0.0


def _window_segments(
    vocabulary: Vocabulary,
    features: LongLogMel,
    span: tuple[int, int],
    options: TranscribeOptions,
    language: str | None,
    previous: _PreviousText,
    heads: Heads,
) -> Generator[Request, Any, tuple[list[Segment], int]]:
    """Ask for one window's segments; returns them and the frames to advance by. ``span``: frames with
    sound.
    """
    window, frames = features.window(*span, _FRAMES), span[1] - span[0]
    start, end = span[0] * HOP / RATE, span[1] * HOP / RATE  # seconds
    decoded = yield from decode_window(
        vocabulary, window, options, language, previous.tokens[previous.read_from :]
    )
    if _is_silent(decoded, options):
        return [], frames
    segments, seconds, closed = split_window(decoded, vocabulary, start, frames * HOP / RATE)
    onwards = round(seconds * RATE / HOP)
    if options.word_timestamps:
        sounding = TimedWindow(window, start, frames // 2)
        yield from add_words(vocabulary, sounding, segments, heads, options, language, previous.last_end)
        times = WindowTimes(start, end, features.seconds)
        seek = times.start + seconds if closed else None
        kept, seek = _behind_words(segments, times, options.hallucination_silence_threshold, previous, seek)
        onwards = onwards if seek is None else round(seek * RATE / HOP) - span[0]
        if kept is None:
            return [], onwards
        segments = kept
    for segment in segments:
        clear_if_empty(segment)
        end_at(segment, end)
        previous.tokens += segment.tokens
    if not options.condition_on_previous_text or decoded.temperature > _CONFIDENT:
        previous.read_from = len(previous.tokens)
    return segments, onwards


def _behind_words(
    segments: list[Segment],
    times: WindowTimes,
    threshold: float | None,
    previous: _PreviousText,
    seek: float | None,
) -> tuple[list[Segment] | None, float | None]:
    """Segments that stay (None: the window is transcribed again from elsewhere), and where the next window
    begins, in seconds (None: the segments say).

    Args:
        seek: the end of a closed window; None: the next begins after the last word.
    """
    last = _last_end(segments)
    if seek is None and last is not None and last > times.start:
        seek = last if threshold is None else seek_behind_words(times, last, threshold)
    if threshold is not None:
        kept, seek = without_hallucinations(segments, times, threshold, previous.last_end, seek)
        if kept is None:
            return None, seek
        segments = kept
    last = _last_end(segments)
    previous.last_end = previous.last_end if last is None else last
    return segments, seek


def _last_end(segments: Sequence[Segment]) -> float | None:
    """The end of the last word, or of the last segment where there is none."""
    ends = [segment.words[-1].end for segment in segments if segment.words]
    return [segments[-1].end, *ends][-1] if segments else None


def _is_silent(decoded: Decoded, options: TranscribeOptions) -> bool:
    """Whether the model says that nobody speaks, and the text is unlikely."""
    if options.no_speech is None or decoded.no_speech_prob <= options.no_speech:
        return False
    return options.logprob is None or decoded.avg_logprob <= options.logprob
