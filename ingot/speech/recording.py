"""A recording from its first window to its last.

Owns the order of windows, what each reads of those before, and silence that is skipped. Source: OpenAI's
Whisper, ``transcribe``. Knows no executor: it asks for windows, as they do.

    asking = transcribe_recording(vocabulary, samples, mels=80, options=options)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch

from ingot.llm.outputs import Output
from ingot.processors.log_mel import HOP, RATE, WINDOW, WINDOW_SECONDS, fit, log_mel
from ingot.speech.options import TranscribeOptions
from ingot.speech.segments import Segment, split_window
from ingot.speech.window import Asked, Decoded, Vocabulary, decode_window, detect_language

_CONFIDENT = 0.5  # above this temperature a text is nothing to go on from


@dataclass
class Transcript:
    """What a recording says. ``duration`` is in seconds; models of English alone tell no ``language``."""

    segments: list[Segment] = field(default_factory=list)
    language: str | None = None
    language_probability: float | None = None
    duration: float = 0.0

    @property
    def text(self) -> str:
        """Of all segments."""
        return "".join(segment.text for segment in self.segments)


Recording = Generator[Asked, Output, Transcript]


def transcribe_recording(
    vocabulary: Vocabulary,
    samples: torch.Tensor,
    mels: int,
    options: TranscribeOptions,
    heard: Callable[[Segment], None] = lambda segment: None,
) -> Recording:
    """Ask for one window after another.

    Args:
        samples: float32 [N] at 16 kHz, on the device that computes features.
        heard: told each segment as it is known.
    """
    found = Transcript(duration=len(samples) / RATE, language=options.language)
    features = log_mel(fit(samples, len(samples) + WINDOW), mels)
    frames = len(samples) // HOP
    if vocabulary.tokens.multilingual and options.language is None and frames:
        probabilities = yield from detect_language(vocabulary, _window(features, 0))
        found.language, found.language_probability = next(iter(probabilities.items()))
    said = _initial(vocabulary, options)
    read_from, seek = 0, 0
    while seek < frames:
        seconds = min(WINDOW_SECONDS, (frames - seek) * HOP / RATE)
        window = _window(features, seek, min(seek + WINDOW // HOP, frames))
        decoded = yield from decode_window(vocabulary, window, options, found.language, said[read_from:])
        if _is_silent(decoded, options):
            seek += round(seconds * RATE / HOP)
            continue
        segments, onwards = split_window(decoded, vocabulary, seek * HOP / RATE, seconds)
        for segment in segments:
            segment.id, segment.seek = len(found.segments), seek
            found.segments.append(segment)
            said += segment.tokens
            heard(segment)
        if not options.condition_on_previous_text or decoded.temperature > _CONFIDENT:
            read_from = len(said)
        seek += max(round(onwards * RATE / HOP), 1)
    return found


def _window(features: torch.Tensor, start: int, end: int | None = None) -> torch.Tensor:
    """[mels, 3000] frames from ``start`` on; what lies behind ``end`` is 0."""
    return fit(features[:, start : start + WINDOW // HOP if end is None else end], WINDOW // HOP).contiguous()


def _initial(vocabulary: Vocabulary, options: TranscribeOptions) -> list[int]:
    if not options.initial_prompt or vocabulary.tokenizer is None:
        return []
    return vocabulary.tokenizer.encode_parts([" " + options.initial_prompt.strip()])


def _is_silent(decoded: Decoded, options: TranscribeOptions) -> bool:
    """Whether nobody speaks, by the model's own word and without a likely text."""
    if options.no_speech is None or decoded.no_speech_prob <= options.no_speech:
        return False
    return options.logprob is None or decoded.avg_logprob <= options.logprob
