"""One window of at most 30 seconds → its tokens.

Owns the requests that a window makes: its prompt, the rules of its transcript, other temperatures where a
text repeats itself or is unlikely. Knows no recording and no executor: a window asks, and is told what came.

    asking = decode_window(vocabulary, features, options, "en", previous=[])
    request = next(asking)                      # then asking.send(output), until it returns a Decoded
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from ingot.config.sampling import SamplingParams
from ingot.config.transcript import DETECT, TranscriptRules
from ingot.llm.outputs import Answer, Output
from ingot.llm.prompts import Input, Prompt
from ingot.processors.tokenizer_base import Tokenizer
from ingot.speech.options import TranscribeOptions
from ingot.speech.tokens import SpeechTokens, non_speech_tokens

_TOP_LANGUAGES = 20


@dataclass(frozen=True)
class Vocabulary:
    """What a window needs to know of the engine. ``tokenizer``: None in engines without one."""

    tokens: SpeechTokens
    tokenizer: Tokenizer | None
    longest: int  # tokens that the decoder takes
    suppressed: tuple[int, ...] = ()  # besides the tokens that start and frame transcripts
    begin_suppressed: tuple[int, ...] = ()
    last_first: int | None = 50

    @classmethod
    def of(cls, tokens: SpeechTokens, tokenizer: Tokenizer | None, longest: int) -> Vocabulary:
        """With the tokens that the original suppresses: what is not speech, and a first space."""
        if tokenizer is None:
            return cls(tokens, None, longest, begin_suppressed=(tokens.end,))
        blank = tokenizer.encode_parts([" "])
        return cls(
            tokens, tokenizer, longest, tuple(sorted(non_speech_tokens(tokenizer))), (*blank, tokens.end)
        )

    def rules(self, forced: Sequence[int], options: TranscribeOptions) -> TranscriptRules:
        """A transcript's behind its forced tokens."""
        tokens = self.tokens
        frame = (tokens.transcribe, tokens.translate, tokens.start, tokens.previous, tokens.start_lm)
        chosen = self.suppressed if options.suppress is None else options.suppress
        return TranscriptRules(
            end=tokens.end,
            no_speech=tokens.no_speech,
            first_timestamp=tokens.first_timestamp,
            forced=tuple(forced),
            languages=tuple(tokens.languages.values()),
            suppressed=(*chosen, *frame, tokens.no_speech, tokens.no_timestamps),
            begin_suppressed=self.begin_suppressed,
            timestamps=options.timestamps,
            last_first=self.last_first,
            patience=options.patience,
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Of tokens, timestamps and others that frame it left out; the ids where there is no tokenizer."""
        said = [token for token in tokens if token < self.tokens.end]
        return self.tokenizer.decode(said) if self.tokenizer is not None else " ".join(map(str, said))


@dataclass(frozen=True)
class Asked:
    """A request for ``llm.generate``."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Decoded:
    """What became of a window. ``tokens``: with timestamps, without those that frame the transcript."""

    tokens: list[int]
    text: str
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    compression_ratio: float
    logprobs: list[float] = field(default_factory=list)


Asking = Generator[Asked, Output, Decoded]


def decode_window(
    vocabulary: Vocabulary,
    features: torch.Tensor,
    options: TranscribeOptions,
    language: str | None,
    previous: Sequence[int],
) -> Asking:
    """Ask for a window's text at one temperature after another, until one will do.

    Args:
        features: [mels, frames] of the window.
        language: code; None in models of English alone.
        previous: tokens that were said before; the last of them are read.
    """
    *forced, prompt = _start(vocabulary, features, options, language, previous)
    decoded = None
    for temperature in options.temperatures:
        output = yield Asked(prompt, _params(vocabulary, forced, options, temperature))
        decoded = _best(vocabulary, output.answers, len(forced), temperature, options)
        if not needs_another(decoded, options):
            break
    assert decoded is not None
    return decoded


def detect_language(
    vocabulary: Vocabulary, features: torch.Tensor
) -> Generator[Asked, Output, dict[str, float]]:
    """Ask for the language of a window: probabilities by code, the likeliest first."""
    rules = vocabulary.rules([DETECT], TranscribeOptions())
    params = SamplingParams(max_new_tokens=1, logprobs=_TOP_LANGUAGES, transcript=rules)
    output = yield Asked(Prompt([Input(features), [vocabulary.tokens.start]]), params)
    told = output.answers[0].logprobs
    assert told is not None
    codes = {token: code for code, token in vocabulary.tokens.languages.items()}
    return {codes[token]: math.exp(value) for token, value in told[0].top[1:] if token in codes}


def needs_another(decoded: Decoded, options: TranscribeOptions) -> bool:
    """Whether a text repeats itself or is unlikely, and the window not silent."""
    unlikely = options.logprob is not None and decoded.avg_logprob < options.logprob
    if unlikely and options.no_speech is not None and decoded.no_speech_prob > options.no_speech:
        return False
    repeats = options.compression_ratio is not None and decoded.compression_ratio > options.compression_ratio
    return unlikely or repeats


def compression_ratio(text: str) -> float:
    """Bytes of a text over those that zlib makes of it."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def _start(
    vocabulary: Vocabulary,
    features: torch.Tensor,
    options: TranscribeOptions,
    language: str | None,
    previous: Sequence[int],
) -> tuple[*tuple[int, ...], Prompt]:
    """The forced tokens, then the prompt: what was said before, and the start."""
    tokens = vocabulary.tokens
    start, *forced = tokens.prompt(language, options.task, timestamps=options.timestamps)
    most = vocabulary.longest // 2 - 1
    hot = _encoded(vocabulary, options.hotwords)[: most // 2]
    read = [*hot, *previous[-(most - len(hot)) :]] if previous else hot
    return (*forced, Prompt([Input(features), [*([tokens.previous, *read] if read else []), start]]))


def _params(
    vocabulary: Vocabulary, forced: Sequence[int], options: TranscribeOptions, temperature: float
) -> SamplingParams:
    params = SamplingParams(
        max_new_tokens=len(forced) + vocabulary.longest // 2,
        stop_token_ids=(vocabulary.tokens.end,),
        logprobs=0,
        transcript=vocabulary.rules(forced, options),
    )
    if temperature > 0:
        return params.replace(temperature=temperature, n=options.best_of, seed=options.seed)
    if options.beam_size > 1:
        return params.replace(num_beams=options.beam_size, length_penalty=options.length_penalty)
    return params


def _best(
    vocabulary: Vocabulary,
    answers: Sequence[Answer],
    num_forced: int,
    temperature: float,
    options: TranscribeOptions,
) -> Decoded:
    """The likeliest answer for its length."""
    found = [_decoded(vocabulary, answer, num_forced, temperature) for answer in answers]
    return max(found, key=lambda one: sum(one.logprobs) / max(len(one.tokens), 1))


def _decoded(vocabulary: Vocabulary, answer: Answer, num_forced: int, temperature: float) -> Decoded:
    told = answer.logprobs
    assert told is not None
    tokens = answer.token_ids[num_forced:]
    values = [one.logprob for one in told[num_forced:]]
    values += [] if answer.stop_logprob is None else [answer.stop_logprob]
    text = vocabulary.text(tokens).strip()
    return Decoded(
        tokens,
        text,
        sum(values) / (len(tokens) + 1),
        math.exp(told[0].top[0][1]),
        temperature,
        compression_ratio(text),
        values,
    )


def _encoded(vocabulary: Vocabulary, text: str | None) -> list[int]:
    """Ids of a text as words that follow others."""
    if not text or vocabulary.tokenizer is None:
        return []
    return vocabulary.tokenizer.encode_parts([" " + text.strip()])
