"""Options of a transcription, with the defaults of ``transcribe`` in OpenAI's Whisper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypedDict

from ingot.config.json_config import JsonConfig
from ingot.errors import RequestError
from ingot.models.speech_tokens import Task
from ingot.text.languages import language_code

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"
MAX_INITIAL_TIMESTAMP = 1.0
_MOST_SEQUENCES = 64


class TranscribeValues(TypedDict, total=False):
    """Fields of ``TranscribeOptions`` for type checkers and editors."""

    language: str | None
    task: Task
    timestamps: bool
    word_timestamps: bool
    prepend_punctuations: str
    append_punctuations: str
    chunked: bool
    clip_timestamps: Sequence[float] | str
    temperatures: Sequence[float] | float
    beam_size: int | None
    patience: float | None
    length_penalty: float | None
    best_of: int | None
    compression_ratio: float | None
    logprob: float | None
    no_speech: float | None
    hallucination_silence_threshold: float | None
    condition_on_previous_text: bool
    initial_prompt: str | None
    carry_initial_prompt: bool
    prefix: str | None
    hotwords: str | None
    suppress: Sequence[int] | None
    suppress_blank: bool
    max_initial_timestamp: float | None
    seed: int
    max_new_tokens: int | None


@dataclass(frozen=True)
class TranscribeOptions(JsonConfig):
    """Options of one recording; None turns off a threshold, or resets a search to its simplest form.

    Attributes:
        language: code or English name; None detects it in the first window.
        task: ``translate`` gives English.
        timestamps: the model says when segments begin and end; without, windows do not overlap.
        word_timestamps: segments have words with times; segments and windows then begin and end with them.
        chunked: chunks of speech of at most 30 s are transcribed independently, many at once; faster, but the
            text may differ, since none reads the text before it.
        prepend_punctuations: with word timestamps: these marks join the following word.
        append_punctuations: with word timestamps: these marks join the preceding word.
        clip_timestamps: start and end of each clip in seconds, alternating; the last end defaults to the
            recording's. Clips may touch. Text such as ``"0,5,5,8"`` is accepted, too.
        temperatures: tried in turn while a window's text repeats itself or is unlikely; 0 is greedy or beam
            search. A single number is accepted, too.
        beam_size: beams at temperature 0; None: greedy.
        patience: a beam search ends with ``beam_size`` times so many answers; None: 1.
        length_penalty: answers are compared by log-probability over length to this power; None: 1.
        best_of: answers to choose from at other temperatures; None: 1.
        compression_ratio: a text that zlib compresses more than this repeats itself.
        logprob: least average log-probability of a text.
        no_speech: least probability at which a window without a likely text is silent.
        hallucination_silence_threshold: with word timestamps: made-up text is dropped where the silence
            around it is longer than so many seconds.
        condition_on_previous_text: each window reads the text of those before it.
        initial_prompt: text that the first window reads before its own: names, spelling, style.
        prefix: text with which each window's transcript begins; it is not part of the result.
        carry_initial_prompt: every window reads the initial prompt, and after it what fits of the text
            before.
        hotwords: words that every window reads first, at most a quarter of what the decoder takes.
        suppress: ids that never occur, -1 for all that are not speech; None: only those.
        suppress_blank: no transcript begins with a space or ends before its first token.
        max_initial_timestamp: latest start, in seconds, of a window's first segment; generation_config.json
            may replace the default; None or 0: any.
        seed: for sampling, -2**63 to 2**63 - 1.
        max_new_tokens: per window; None: half of what the decoder takes.
    """

    language: str | None = None
    task: Task = "transcribe"
    timestamps: bool = True
    word_timestamps: bool = False
    prepend_punctuations: str = PREPENDED
    append_punctuations: str = APPENDED
    chunked: bool = False
    clip_timestamps: tuple[float, ...] = ()
    temperatures: tuple[float, ...] = TEMPERATURES
    beam_size: int | None = None
    patience: float | None = None
    length_penalty: float | None = None
    best_of: int | None = None
    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6
    hallucination_silence_threshold: float | None = None
    condition_on_previous_text: bool = True
    initial_prompt: str | None = None
    carry_initial_prompt: bool = False
    prefix: str | None = None
    hotwords: str | None = None
    suppress: tuple[int, ...] | None = None
    suppress_blank: bool = True
    max_initial_timestamp: float | None = MAX_INITIAL_TIMESTAMP
    seed: int = 0
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        values: dict[str, Any] = {name: _plain(value) for name, value in vars(self).items()}
        clips = values["clip_timestamps"]
        if isinstance(clips, str):
            with suppress(ValueError):  # the text stays, and is of the wrong type
                values["clip_timestamps"] = tuple(float(part) for part in clips.split(",") if part.strip())
        temperature = values["temperatures"]
        if isinstance(temperature, (int, float)) and not isinstance(temperature, bool):
            values["temperatures"] = (float(temperature),)
        if isinstance(values["language"], str):
            values["language"] = language_code(values["language"])
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.task not in ("transcribe", "translate"):
            raise RequestError("unknown task", seen=self.task, allowed="transcribe, translate", field="task")
        for name in self.odd_fields():
            seen, allowed = repr(getattr(self, name))[:60], type(self).__annotations__[name]
            raise RequestError(f"{name} is of the wrong type", seen=seen, allowed=allowed, field=name)
        if not self.temperatures or any(not 0 <= t <= 2 for t in self.temperatures):
            raise _out_of_range("temperatures", self.temperatures, "0 to 2")
        clips = self.clip_timestamps
        if any(not 0 <= one < math.inf for one in clips) or any(a > b for a, b in pairwise(clips)):
            raise _out_of_range("clip_timestamps", clips, "seconds that never fall: start,end,start,end,…")
        if self.suppress is not None and any(one < -1 for one in self.suppress):
            raise RequestError("unknown tokens", seen=self.suppress, allowed="ids, or -1", field="suppress")
        self._check_numbers()
        if self.hallucination_silence_threshold is not None and not self.word_timestamps:
            what, allowed = "made-up text is found by its words' times", "with word_timestamps=True"
            raise RequestError(what, allowed=allowed, field="hallucination_silence_threshold")
        if self.patience not in (None, 1.0) and self.beam_size in (None, 1):
            seen = f"patience {self.patience:g}, beam_size {self.beam_size}"
            allowed = "with a beam_size of 2 or more"
            raise RequestError("patience is of a beam search", seen=seen, allowed=allowed, field="patience")

    @property
    def length_exponent(self) -> float:
        """Power of the length by which log-probabilities are divided."""
        return 1.0 if self.length_penalty is None else self.length_penalty

    def _check_numbers(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise _out_of_range("seed", self.seed, "64 bits")
        for name in ("beam_size", "best_of"):
            count = getattr(self, name)
            if count is not None and not 1 <= count <= _MOST_SEQUENCES:
                raise _out_of_range(name, count, f"1 to {_MOST_SEQUENCES}, or None")
        for name in ("max_new_tokens", "patience", "compression_ratio", "hallucination_silence_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(f"{name} must be positive", seen=value, field=name)
        if self.length_penalty is not None and not -10 <= self.length_penalty <= 10:
            raise _out_of_range("length_penalty", self.length_penalty, "-10 to 10, or None")
        if self.max_initial_timestamp is not None and not 0 <= self.max_initial_timestamp < math.inf:
            raise _out_of_range("max_initial_timestamp", self.max_initial_timestamp, "seconds, or None")


def _out_of_range(name: str, seen: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is out of range", seen=seen, allowed=allowed, field=name)


def _plain(value: Any) -> Any:
    """Lists as tuples; arrays and numbers of NumPy and PyTorch as Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(_plain(one) for one in value) if isinstance(value, list | tuple) else value
