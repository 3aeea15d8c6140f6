"""One window of at most 30 seconds to its tokens: prompt, rules, and other temperatures where needed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.config.decoder_config import DecoderConfig
from ingot.config.sampling_params import SamplingParams
from ingot.config.transcript_rules import TranscriptRules
from ingot.errors import RequestError
from ingot.llm.outputs import Answer, Output
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.models.speech_tokens import TIMESTAMP_SECONDS, SpeechTokens, non_speech_tokens
from ingot.models.whisper_generation import SpeechGeneration
from ingot.speech.speech_options import MAX_INITIAL_TIMESTAMP, TranscribeOptions
from ingot.text.tokenizer.tokenizer_base import Tokenizer

_TOP_LANGUAGES = 20
_LAST_FIRST = round(MAX_INITIAL_TIMESTAMP / TIMESTAMP_SECONDS)
_LONGEST_FRAME = 5  # start, language, task, no timestamps, and the first new token


@dataclass(frozen=True)
class Vocabulary:
    """What a window needs of the engine. ``tokenizer``: None in engines without one."""

    tokens: SpeechTokens
    tokenizer: Tokenizer | None
    longest: int  # most tokens that the decoder takes
    suppressed: tuple[int, ...] = ()  # in addition to tokens that start and frame transcripts
    begin_suppressed: tuple[int, ...] = ()
    last_first: int | None = _LAST_FIRST

    @classmethod
    def of_model(
        cls, config: DecoderConfig, tokenizer: Tokenizer | None, longest: int, generation: Mapping[str, Any]
    ) -> Vocabulary:
        """From a model and its generation_config.json. The tokenizer names its tokens, or, without one, the
        size of its vocabulary.
        """
        tokens = SpeechTokens.of_model(config.vocab_size, tokenizer)
        return cls.of(tokens, tokenizer, longest, SpeechGeneration.of(generation, config.vocab_size))

    @classmethod
    def of(
        cls,
        tokens: SpeechTokens,
        tokenizer: Tokenizer | None,
        longest: int,
        generation: SpeechGeneration = SpeechGeneration(),  # noqa: B008 - it is frozen
    ) -> Vocabulary:
        """With the tokens that the checkpoint suppresses, else the original's: non-speech tokens and a first
        space.
        """
        suppressed, blank = generation.suppress, generation.begin_suppress
        if suppressed is None:
            suppressed = () if tokenizer is None else tuple(sorted(non_speech_tokens(tokenizer)))
        if blank is None:
            blank = (*([] if tokenizer is None else tokenizer.encode_parts([" "])), tokens.end)
        last = _LAST_FIRST if generation.last_first is None else generation.last_first
        return cls(tokens.with_generation(generation), tokenizer, longest, suppressed, blank, last)

    def rules(
        self, options: TranscribeOptions, *, framed: int = 0, detect: Sequence[int] = ()
    ) -> TranscriptRules:
        """The rules of a transcript, ``framed`` tokens after its start; or of choosing one of ``detect``."""
        tokens, seconds = self.tokens, options.max_initial_timestamp
        last_first = round(seconds / TIMESTAMP_SECONDS) if seconds else None  # as in the original, 0: any
        if seconds == MAX_INITIAL_TIMESTAMP:
            last_first = self.last_first
        frame = (tokens.transcribe, tokens.translate, tokens.start, tokens.previous, tokens.start_lm)
        chosen = [-1] if options.suppress is None else options.suppress
        chosen = [token for one in chosen for token in (self.suppressed if one == -1 else (one,))]
        return TranscriptRules(
            end=tokens.end,
            no_speech=tokens.no_speech,
            first_timestamp=tokens.first_timestamp,
            framed=framed,
            detect=tuple(detect),
            suppressed=(*chosen, *frame, tokens.no_speech, tokens.no_timestamps),
            begin_suppressed=self.begin_suppressed if options.suppress_blank else (),
            timestamps=options.timestamps,
            last_first=last_first,
            patience=1.0 if options.patience is None else options.patience,
        )

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens without timestamps and framing tokens; without a tokenizer, the ids."""
        words = [token for token in tokens if token < self.tokens.end]
        return self.tokenizer.decode(words) if self.tokenizer is not None else " ".join(map(str, words))

    def ids(self, text: str) -> list[int]:
        """The ids of a text that follows other text; without a tokenizer, the ids that the text lists. Raises
        ``RequestError`` if, without a tokenizer, it lists something else.
        """
        if self.tokenizer is not None:
            return self.tokenizer.encode_parts([" " + text.strip()]) if text else []
        words = text.split()
        if not all(word.isdecimal() for word in words):
            allowed = "token ids with spaces between them"
            fix = "a checkpoint with its tokenizer"
            raise RequestError("there is no tokenizer for a text", seen=text[:60], allowed=allowed, fix=fix)
        return [int(word) for word in words]


@dataclass(frozen=True)
class DecodeRequest:
    """A request for ``llm.generate``."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Decoded:
    """A window's result. ``tokens``: with timestamps, without those that frame the transcript."""

    tokens: list[int]
    text: str
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    compression_ratio: float
    logprobs: list[float] = field(default_factory=list)


Asking = Generator[DecodeRequest, Output, Decoded]


def decode_window(
    vocabulary: Vocabulary,
    window: Input,
    options: TranscribeOptions,
    language: str | None,
    previous: Sequence[int],
) -> Asking:
    """Ask for a window's text at one temperature after another, until one is good enough.

    Args:
        window: features [mels, frames].
        language: code; None for English-only models.
        previous: tokens of the text before; the last of them are read.
    """
    framed, prompt = _start(vocabulary, window, options, language, previous)
    decoded = None
    for temperature in options.temperatures:
        output = yield DecodeRequest(prompt, _params(vocabulary, framed, options, temperature))
        silence = _silence(output)
        if silence is None:  # the text ended before its first token, which would have it
            rules = vocabulary.rules(options, framed=framed, detect=[vocabulary.tokens.no_speech])
            one = SamplingParams(max_new_tokens=1, logprobs=0, transcript=rules)
            silence = _silence((yield DecodeRequest(prompt, one)))
        assert silence is not None
        decoded = _best(vocabulary, output.answers, temperature, silence, options.length_exponent)
        if not needs_another(decoded, options):
            break
    assert decoded is not None
    return decoded


def detect_language(
    vocabulary: Vocabulary, window: Input
) -> Generator[DecodeRequest, Output, dict[str, float]]:
    """Ask for the language of a window: probabilities by code, the likeliest first."""
    rules = vocabulary.rules(TranscribeOptions(), detect=[*vocabulary.tokens.languages.values()])
    params = SamplingParams(max_new_tokens=1, logprobs=_TOP_LANGUAGES, transcript=rules)
    output = yield DecodeRequest(Prompt([window, [vocabulary.tokens.start]]), params)
    logprobs = output.answers[0].logprobs
    assert logprobs is not None
    codes = {token: code for code, token in vocabulary.tokens.languages.items()}
    return {codes[token]: math.exp(value) for token, value in logprobs[0].top[1:] if token in codes}


def needs_another(decoded: Decoded, options: TranscribeOptions) -> bool:
    """Whether a text repeats itself, or is unlikely in a window that is not silent."""
    unlikely = options.logprob is not None and decoded.avg_logprob < options.logprob
    if unlikely and options.no_speech is not None and decoded.no_speech_prob > options.no_speech:
        return False
    repeats = options.compression_ratio is not None and decoded.compression_ratio > options.compression_ratio
    return unlikely or repeats


def compression_ratio(text: str) -> float:
    """Bytes of a text over its bytes compressed by zlib."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def _start(
    vocabulary: Vocabulary,
    window: Input,
    options: TranscribeOptions,
    language: str | None,
    previous: Sequence[int],
) -> tuple[int, Prompt]:
    """The number of tokens after the start token, and the prompt: the text before, the start token, and they.
    Raises ``RequestError`` if the prefix is too long, or the model does not know the language or the task.
    """
    tokens, half = vocabulary.tokens, vocabulary.longest // 2
    prefix = vocabulary.ids(options.prefix or "")
    if options.max_new_tokens is not None and options.max_new_tokens < half:
        prefix = prefix[options.max_new_tokens - half :]  # as in the original
    if len(prefix) > half - _LONGEST_FRAME:
        seen, allowed = f"{len(prefix)} tokens", f"at most {half - _LONGEST_FRAME}"
        raise RequestError("prefix is too long", seen=seen, allowed=allowed, field="prefix")
    frame = [*tokens.prompt(language, options.task, timestamps=options.timestamps), *prefix]
    most = half - 1
    read = vocabulary.ids(options.hotwords or "")[: most // 2]
    if options.carry_initial_prompt:
        read += vocabulary.ids(options.initial_prompt or "")[len(read) - most :]
    read += list(previous)[-(most - len(read)) :] if len(read) < most else []
    return len(frame) - 1, Prompt([window, [*([tokens.previous, *read] if read else []), *frame]])


def _params(
    vocabulary: Vocabulary, framed: int, options: TranscribeOptions, temperature: float
) -> SamplingParams:
    most = vocabulary.longest // 2
    params = SamplingParams(
        max_new_tokens=min(options.max_new_tokens or most, most),
        stop_token_ids=(vocabulary.tokens.end,),
        logprobs=0,
        transcript=vocabulary.rules(options, framed=framed),
    )
    if temperature > 0:
        return params.replace(temperature=temperature, n=options.best_of or 1, seed=options.seed)
    if options.beam_size is not None and options.beam_size > 1:
        return params.replace(num_beams=options.beam_size, length_penalty=options.length_exponent)
    return params


def _silence(output: Output) -> float | None:
    """The probability that nobody speaks, from the first token's log-probabilities."""
    logprobs = next((answer.logprobs for answer in output.answers if answer.logprobs), None)
    return None if logprobs is None else math.exp(logprobs[0].top[0][1])


def _best(
    vocabulary: Vocabulary, answers: Sequence[Answer], temperature: float, silence: float, penalty: float
) -> Decoded:
    """The likeliest answer for its length."""
    found: list[Decoded] = []
    for answer in answers:
        assert answer.logprobs is not None
        values = [one.logprob for one in answer.logprobs]
        values += [] if answer.stop_logprob is None else [answer.stop_logprob]
        tokens, text = answer.token_ids, vocabulary.text(answer.token_ids).strip()
        mean, ratio = sum(values) / (len(tokens) + 1), compression_ratio(text)
        found.append(Decoded(tokens, text, mean, silence, temperature, ratio, values))
    return max(found, key=lambda one: sum(one.logprobs) / max(len(one.tokens), 1) ** penalty)
