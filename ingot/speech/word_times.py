"""The words of a window's segments, with times.

Source: OpenAI's Whisper, ``tokenizer.split_to_word_tokens`` and ``timing.add_word_timestamps``.
"""

from __future__ import annotations

import string
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ingot.llm.prompt_inputs import Input, Prompt
from ingot.speech.dtw_alignment import token_times
from ingot.speech.segments import Segment, Word
from ingot.speech.speech_options import APPENDED, PREPENDED, TranscribeOptions
from ingot.speech.window_decoding import Vocabulary
from ingot.text.languages import NO_SPACES

_SENTENCE_ENDS = ".。!！?？"
_MOST_MEDIAN = 0.7  # seconds that a usual word has at most
_SEGMENT_SLACK = 0.5  # seconds by which words and segments may differ before segments are believed
_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class ScoreRequest:
    """A request for ``llm.cross_attention``, answered with its result."""

    prompt: Prompt
    heads: Sequence[tuple[int, int]]
    below: int


Scored = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Timed:
    """A word with times from the window's start."""

    text: str
    tokens: list[int]
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class TimedWindow:
    """A window's ``input``, which begins at ``start`` seconds, and how many encoded ``positions`` have
    sound.
    """

    input: Input
    start: float
    positions: int


def add_words(
    vocabulary: Vocabulary,
    window: TimedWindow,
    segments: Sequence[Segment],
    heads: Sequence[tuple[int, int]],
    options: TranscribeOptions,
    language: str | None,
    last_end: float,
) -> Generator[ScoreRequest, Scored, None]:
    """Give each segment its words, and the times that follow from them.

    Args:
        last_end: of the words before the window, in seconds.
    """
    texts = [[token for token in one.tokens if token < vocabulary.tokens.end] for one in segments]
    text_tokens = [token for text in texts for token in text]
    words: list[Timed] = []
    if text_tokens and window.positions:
        start = vocabulary.tokens.prompt(language, options.task, timestamps=False)
        ids = [*start, *text_tokens, vocabulary.tokens.end]
        prompt = Prompt([window.input, ids])
        logprobs, scores = yield ScoreRequest(prompt, heads, vocabulary.tokens.end)
        times = token_times(scores[:, :, : window.positions], len(start) - 1)
        written = "en" if options.task == "translate" else language
        cut = split_words(vocabulary, text_tokens, written)
        words = timed_words(vocabulary, cut, times, logprobs[len(start) - 1 :])
    typical = typical_duration(words)
    shorten_at_sentences(words, 2 * typical)
    merge_punctuation(words, options.prepend_punctuations, options.append_punctuations)
    rest = iter(words)
    for segment, text in zip(segments, texts, strict=True):  # each takes words for all its tokens
        segment.words, taken = [], 0
        while taken < len(text) and (word := next(rest, None)) is not None:
            taken += len(word.tokens)
            if word.text:
                begin, end = round(window.start + word.start, 2), round(window.start + word.end, 2)
                segment.words.append(Word(word.text, begin, end, word.probability))
        if segment.words:
            shorten_after_pause(segment.words, typical, last_end)
            agree(segment, segment.words, typical)
            timed: list[Segment | Word] = [segment, *segment.words]
            for one in timed:
                one.start, one.end = round(one.start, 3), round(one.end, 3)
            last_end = segment.end


def split_words(vocabulary: Vocabulary, tokens: Sequence[int], language: str | None) -> list[list[int]]:
    """Tokens of each word: of each character in a language without spaces, and each token by itself in an
    engine without a tokenizer.
    """
    if vocabulary.tokenizer is None:
        return [[token] for token in tokens]
    pieces = _characters(vocabulary, tokens)
    if language in NO_SPACES:
        return pieces
    words: list[list[int]] = []
    for piece in pieces:
        text = vocabulary.text(piece)
        begins = text.startswith(" ") or text.strip() in string.punctuation
        if begins or not words:
            words.append(piece)
        else:
            words[-1] += piece
    return words


def _characters(vocabulary: Vocabulary, tokens: Sequence[int]) -> list[list[int]]:
    """The shortest runs of tokens that are complete characters; U+FFFD in the text itself is complete."""
    whole, done = vocabulary.text(tokens), 0
    pieces: list[list[int]] = []
    taken: list[int] = []
    for token in tokens:
        taken.append(token)
        text = vocabulary.text(taken)
        half = text.find(_HALF_CHARACTER)
        if half < 0 or whole[done + half : done + half + 1] == _HALF_CHARACTER:
            pieces.append(taken)
            taken, done = [], done + len(text)
    return [*pieces, taken] if taken else pieces


def timed_words(
    vocabulary: Vocabulary, words: Sequence[list[int]], times: np.ndarray, logprobs: torch.Tensor
) -> list[Timed]:
    """Words with their times; ``times`` and ``logprobs`` are of all their tokens in order."""
    probabilities, first = logprobs.exp().tolist(), 0
    found = []
    for tokens in words:
        last = first + len(tokens)
        mean = float(np.mean(probabilities[first:last]))
        text = vocabulary.text(tokens)
        found.append(Timed(text, tokens, float(times[first]), float(times[last]), mean))
        first = last
    return found


def typical_duration(words: Sequence[Timed]) -> float:
    """The median duration in seconds, at most 0.7, of the words that take any time."""
    durations = [word.end - word.start for word in words if word.end != word.start]
    return min(_MOST_MEDIAN, float(np.median(durations))) if durations else 0.0


def shorten_at_sentences(words: Sequence[Timed], longest: float) -> None:
    """Cut longer words at the end or the start of a sentence: the pause is not theirs."""
    if not longest:
        return
    for before, word in pairwise(words):
        if word.end - word.start <= longest:
            continue
        if word.text in _SENTENCE_ENDS:
            word.end = word.start + longest
        elif before.text in _SENTENCE_ENDS:
            word.start = word.end - longest


def merge_punctuation(words: list[Timed], prepended: str = PREPENDED, appended: str = APPENDED) -> None:
    """Join ``prepended`` marks to the following word and ``appended`` ones to the preceding word, whose times
    stay; the marks' own entries have no text then.
    """
    following = len(words) - 1
    for i in range(len(words) - 2, -1, -1):
        mark, word = words[i], words[following]
        if mark.text.startswith(" ") and mark.text.strip() in prepended:
            word.text, word.tokens = mark.text + word.text, mark.tokens + word.tokens
            mark.text, mark.tokens = "", []
        else:
            following = i
    previous = 0
    for i in range(1, len(words)):
        word, mark = words[previous], words[i]
        if not word.text.endswith(" ") and mark.text in appended:
            word.text, word.tokens = word.text + mark.text, word.tokens + mark.tokens
            mark.text, mark.tokens = "", []
        else:
            previous = i


def shorten_after_pause(words: Sequence[Word], typical: float, last_end: float) -> None:
    """Shorten the first two words after a pause to twice the usual duration."""
    longest, first = 2 * typical, words[0]
    second = words[1] if len(words) > 1 else None
    both_long = second is not None and second.end - first.start > 2 * longest
    if first.end - last_end <= 4 * typical or not (first.end - first.start > longest or both_long):
        return
    if second is not None and second.end - second.start > longest:
        first.end = second.start = max(second.end / 2, second.end - longest)
    first.start = max(0.0, first.end - longest)


def agree(segment: Segment, words: Sequence[Word], typical: float) -> None:
    """A segment begins and ends with its words, unless they are much too long: then its own times hold."""
    first, last = words[0], words[-1]
    if segment.start < first.end and segment.start - _SEGMENT_SLACK > first.start:
        first.start = max(0.0, min(first.end - typical, segment.start))
    else:
        segment.start = first.start
    if segment.end > last.start and segment.end + _SEGMENT_SLACK < last.end:
        last.end = max(last.start + typical, segment.end)
    else:
        segment.end = last.end
