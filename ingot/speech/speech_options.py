"""How a recording is transcribed.

Covers the options with their defaults and bounds. The defaults are those of ``transcribe`` in OpenAI's
Whisper.

    TranscribeOptions(language="de", temperatures=(0.0,))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ingot.config.json_config import JsonConfig
from ingot.errors import RequestError
from ingot.models.speech_tokens import Task
from ingot.text.languages import language_code

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"
MAX_INITIAL_TIMESTAMP = 1.0
_MOST_SEQUENCES = 64


@dataclass(frozen=True)
class TranscribeOptions(JsonConfig):
    """Options of one recording; None turns a threshold off, and a search back to its simplest form.

    Attributes:
        language: code or English name; None detects it in the first window.
        task: ``translate`` gives English.
        timestamps: the model says when segments begin and end; without, windows do not overlap.
        word_timestamps: segments have words with times; segments and windows then begin and end with them.
        chunked: the stretches with speech are recordings of their own, of at most 30 s, and decode together;
            faster, and the text may differ, since none reads the text before it.
        prepend_punctuations: with word timestamps: these marks join the word behind them.
        append_punctuations: with word timestamps: these marks join the word before them.
        clip_timestamps: start and end of each clip in seconds, in turn; the last end is the recording's by
            default. Clips may touch. Text as in ``"0,5,5,8"`` is taken, too.
        temperatures: tried in turn while a window's text repeats itself or is unlikely; 0 is greedy or beams.
            A number is the only one.
        beam_size: beams at temperature 0; None: greedy.
        patience: a beam search ends with ``beam_size`` times so many answers; None: 1.
        length_penalty: answers are compared by log-probability over length to this power; None: 1.
        best_of: answers to choose from at other temperatures; None: 1.
        compression_ratio: a text that zlib shrinks further than this repeats itself.
        logprob: least average log-probability of a text.
        no_speech: least probability at which a window without a likely text is silent.
        hallucination_silence_threshold: with word timestamps: made-up text is dropped where silence around it
            is longer than so many seconds.
        condition_on_previous_text: each window reads the text of those before it.
        initial_prompt: text that the first window reads before its own: names, spelling, style.
        prefix: text with which each window's transcript begins; it is not part of the result.
        carry_initial_prompt: every window reads the initial prompt, and behind it what still fits of the text
            before it.
        hotwords: words that every window reads before its own, at most a quarter of what the decoder takes.
        suppress: ids that never occur, -1 for all that are not speech; None: those alone.
        suppress_blank: no transcript begins with a space or ends before its first token.
        max_initial_timestamp: latest time, in seconds, at which a window's first segment may begin; at its
            default the checkpoint's generation_config.json may say another; None or 0: any.
        seed: of all draws, -2**63 to 2**63 - 1.
        max_new_tokens: of a window; None: half of what the decoder takes.
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
        self._normalize()
        if self.task not in ("transcribe", "translate"):
            raise RequestError("unknown task", seen=self.task, allowed="transcribe, translate", field="task")
        self._check_types()
        if not self.temperatures or any(not 0 <= t <= 2 for t in self.temperatures):
            raise _out_of_range("temperatures", self.temperatures, "0 to 2")
        if any(not 0 <= one < math.inf for one in self.clip_timestamps) or not _never_fall(
            self.clip_timestamps
        ):
            allowed = "seconds that never fall: start,end,start,end,…"
            raise _out_of_range("clip_timestamps", self.clip_timestamps, allowed)
        if self.suppress is not None and any(one < -1 for one in self.suppress):
            raise RequestError("unknown tokens", seen=self.suppress, allowed="ids, or -1", field="suppress")
        self._check_numbers()
        self._check_combinations()

    @property
    def length_exponent(self) -> float:
        """Power of the length over which answers are compared."""
        return 1.0 if self.length_penalty is None else self.length_penalty

    def _normalize(self) -> None:
        """Numbers of NumPy, lists, text of clips, and one temperature as plain values."""
        values: dict[str, Any] = {name: _plain(value) for name, value in vars(self).items()}
        if isinstance(values["clip_timestamps"], str):
            values["clip_timestamps"] = _numbers(values["clip_timestamps"])
        temperature = values["temperatures"]
        if isinstance(temperature, (int, float)) and not isinstance(temperature, bool):
            values["temperatures"] = (float(temperature),)
        if isinstance(values["language"], str):
            values["language"] = language_code(values["language"])
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        for name in self.odd_fields():
            allowed = type(self).__annotations__[name]
            raise RequestError(
                f"{name} is of the wrong type",
                seen=repr(getattr(self, name))[:60],
                allowed=allowed,
                field=name,
            )

    def _check_numbers(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise _out_of_range("seed", self.seed, "64 bits")
        for name in ("beam_size", "best_of"):
            count = getattr(self, name)
            if count is not None and not 1 <= count <= _MOST_SEQUENCES:
                raise _out_of_range(name, count, f"1 to {_MOST_SEQUENCES}, or None")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError(
                "max_new_tokens must be positive", seen=self.max_new_tokens, field="max_new_tokens"
            )
        for name in ("patience", "compression_ratio", "hallucination_silence_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(f"{name} must be positive", seen=value, field=name)
        if self.length_penalty is not None and not -10 <= self.length_penalty <= 10:
            raise _out_of_range("length_penalty", self.length_penalty, "-10 to 10, or None")
        if self.max_initial_timestamp is not None and not 0 <= self.max_initial_timestamp < math.inf:
            raise _out_of_range("max_initial_timestamp", self.max_initial_timestamp, "seconds, or None")

    def _check_combinations(self) -> None:
        if self.hallucination_silence_threshold is not None and not self.word_timestamps:
            raise RequestError(
                "made-up text is found by its words' times", allowed="with word_timestamps=True",
                field="hallucination_silence_threshold",
            )  # fmt: skip
        if self.patience not in (None, 1.0) and self.beam_size in (None, 1):
            raise RequestError(
                "patience is of a beam search",
                seen=f"patience {self.patience:g}, beam_size {self.beam_size}",
                allowed="with a beam_size of 2 or more", field="patience",
            )  # fmt: skip


def _out_of_range(name: str, seen: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is out of range", seen=seen, allowed=allowed, field=name)


def _never_fall(times: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in pairwise(times))


def _plain(value: Any) -> Any:
    """A list as a tuple; arrays and numbers of NumPy and PyTorch as Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(_plain(one) for one in value) if isinstance(value, list | tuple) else value


def _numbers(text: str) -> Any:
    """Those that a text lists; the text itself where it lists something else."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        return text
