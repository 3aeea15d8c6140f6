"""One window of at most 30 seconds → its tokens.

Covers the requests that a window makes: its prompt, the rules of its transcript, other temperatures where a
text repeats itself or is unlikely.

    asking = decode_window(vocabulary, Input(features), options, "en", previous=[])
    request = next(asking)                      # then asking.send(output), until it returns a Decoded
"""

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
    """What a window needs to know of the engine. ``tokenizer``: None in engines without one."""

    tokens: SpeechTokens
    tokenizer: Tokenizer | None
    longest: int  # tokens that the decoder takes
    suppressed: tuple[int, ...] = ()  # besides the tokens that start and frame transcripts
    begin_suppressed: tuple[int, ...] = ()
    last_first: int | None = _LAST_FIRST

    @classmethod
    def of_model(
        cls,
        config: DecoderConfig,
        tokenizer: Tokenizer | None,
        longest: int,
        generation: Mapping[str, Any],
    ) -> Vocabulary:
        """Of a model with this generation_config.json. Its tokens are named by the tokenizer, or, without
        one, by the size of its vocabulary.
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
        """With the tokens that the checkpoint suppresses, else those of the original: what is not speech, and
        a first space.
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
        """A transcript's, ``framed`` tokens behind its start; or those that ``detect`` one of some ids."""
        tokens = self.tokens
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
            last_first=self._last_first(options.max_initial_timestamp),
            patience=1.0 if options.patience is None else options.patience,
        )

    def _last_first(self, seconds: float | None) -> int | None:
        """The latest first timestamp of a window, counted from 0 seconds; None: any. As in the original, 0
        seconds are no limit.
        """
        if seconds == MAX_INITIAL_TIMESTAMP:
            return self.last_first
        return round(seconds / TIMESTAMP_SECONDS) if seconds else None

    def text(self, tokens: Sequence[int]) -> str:
        """Of tokens, timestamps and others that frame it left out; the ids where there is no tokenizer."""
        words = [token for token in tokens if token < self.tokens.end]
        return self.tokenizer.decode(words) if self.tokenizer is not None else " ".join(map(str, words))

    def ids(self, text: str) -> list[int]:
        """Of a text as words that follow others, none of an empty one; where there is no tokenizer, the ids
        that the text lists.

        Raises:
            RequestError: without a tokenizer, it lists none.
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
    """What became of a window. ``tokens``: with timestamps, without those that frame the transcript."""

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
    """Ask for a window's text at one temperature after another, until one will do.

    Args:
        window: features [mels, frames].
        language: code; None in models of English alone.
        previous: tokens that were said before; the last of them are read.
    """
    framed, prompt = _start(vocabulary, window, options, language, previous)
    decoded = None
    for temperature in options.temperatures:
        output = yield DecodeRequest(prompt, _params(vocabulary, framed, options, temperature))
        silence = _silence(output)
        if silence is None:  # the text has ended before its first token, which would have shown it
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
    window: Input,
    options: TranscribeOptions,
    language: str | None,
    previous: Sequence[int],
) -> tuple[int, Prompt]:
    """How many tokens stand behind the start, and the prompt: what was said before, the start, and they.

    Raises:
        RequestError: the prefix is too long, or the model does not know the language or the task.
    """
    tokens = vocabulary.tokens
    frame = tokens.prompt(language, options.task, timestamps=options.timestamps)
    frame += _prefix(vocabulary, options)
    most = vocabulary.longest // 2 - 1
    read = vocabulary.ids(options.hotwords or "")[: most // 2]
    if options.carry_initial_prompt:
        read += vocabulary.ids(options.initial_prompt or "")[len(read) - most :]
    read += list(previous)[-(most - len(read)) :] if len(read) < most else []
    return len(frame) - 1, Prompt([window, [*([tokens.previous, *read] if read else []), *frame]])


def _prefix(vocabulary: Vocabulary, options: TranscribeOptions) -> list[int]:
    """Tokens that a window's transcript begins with. Like the original, a given number of new tokens leaves
    them the rest of half of what the decoder takes.
    """
    ids = vocabulary.ids(options.prefix or "")
    half = vocabulary.longest // 2
    if options.max_new_tokens is not None and options.max_new_tokens < half:
        ids = ids[options.max_new_tokens - half :]
    longest = half - _LONGEST_FRAME
    if len(ids) > longest:
        raise RequestError(
            "prefix is too long", seen=f"{len(ids)} tokens", allowed=f"at most {longest}", field="prefix"
        )
    return ids


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
    found = [_decoded(vocabulary, answer, temperature, silence) for answer in answers]
    return max(found, key=lambda one: sum(one.logprobs) / max(len(one.tokens), 1) ** penalty)


def _decoded(vocabulary: Vocabulary, answer: Answer, temperature: float, silence: float) -> Decoded:
    token_logprobs = answer.logprobs
    assert token_logprobs is not None
    tokens = answer.token_ids
    values = [one.logprob for one in token_logprobs]
    values += [] if answer.stop_logprob is None else [answer.stop_logprob]
    text = vocabulary.text(tokens).strip()
    return Decoded(
        tokens,
        text,
        sum(values) / (len(tokens) + 1),
        silence,
        temperature,
        compression_ratio(text),
        values,
    )
