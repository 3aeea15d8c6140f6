"""How a recording is transcribed.

Owns the options with their defaults and bounds. Source of the defaults: OpenAI's Whisper.

    TranscribeOptions(language="de", temperatures=(0.0,))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.config.base import JsonConfig
from ingot.errors import RequestError
from ingot.models.speech_tokens import Task
from ingot.processors.languages import language_code

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class TranscribeOptions(JsonConfig):
    """Options of one recording; None turns a threshold off.

    Attributes:
        language: code or English name; None detects it in the first window.
        task: ``translate`` gives English.
        timestamps: the model says when segments begin and end; without, windows do not overlap.
        word_timestamps: segments have words with times; segments and windows then begin and end with them.
        chunked: the stretches with speech are recordings of their own, of at most 30 s, and decode together;
            faster, and the text may differ, since none reads the text before it.
        clip_timestamps: seconds at which what is heard begins and ends, in turn; the recording's end may be
            left out.
        temperatures: tried in turn while a window's text repeats itself or is unlikely; 0 is greedy or beams.
        beam_size: beams at temperature 0.
        patience: a search of beams ends with so many times ``beam_size`` answers.
        length_penalty: answers are compared by log-probability over length to this power.
        best_of: answers to choose from at other temperatures.
        compression_ratio: a text that zlib shrinks further than this repeats itself.
        logprob: least average log-probability of a text.
        no_speech: least probability at which a window without a likely text is silent.
        hallucination_silence_threshold: with word timestamps: made-up text is dropped where silence around it
            is longer than so many seconds.
        condition_on_previous_text: each window reads the text of those before it.
        initial_prompt: text that the first window reads before its own: names, spelling, style.
        carry_initial_prompt: every window reads the initial prompt, and behind it what still fits of the text
            before it.
        hotwords: words that every window reads before its own, at most a quarter of what the decoder takes.
        suppress: ids that never occur, -1 for all that are not speech; None: those alone.
        seed: of all draws, -2**63 to 2**63 - 1.
        max_new_tokens: of a window; None: half of what the decoder takes.
    """

    language: str | None = None
    task: Task = "transcribe"
    timestamps: bool = True
    word_timestamps: bool = False
    chunked: bool = False
    clip_timestamps: tuple[float, ...] = ()
    temperatures: tuple[float, ...] = TEMPERATURES
    beam_size: int = 1
    patience: float = 1.0
    length_penalty: float = 1.0
    best_of: int = 5
    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6
    hallucination_silence_threshold: float | None = None
    condition_on_previous_text: bool = True
    initial_prompt: str | None = None
    carry_initial_prompt: bool = False
    hotwords: str | None = None
    suppress: tuple[int, ...] | None = None
    seed: int = 0
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.language is not None:
            object.__setattr__(self, "language", language_code(self.language))
        if self.task not in ("transcribe", "translate"):
            raise RequestError("unknown task", seen=self.task, allowed="transcribe, translate", flag="task")
        if not self.temperatures or any(not 0 <= t <= 2 for t in self.temperatures):
            raise RequestError(
                "temperatures are out of range", seen=self.temperatures, allowed="0 to 2", flag="temperatures"
            )
        self._check_clips()
        if self.suppress is not None and any(one < -1 for one in self.suppress):
            raise RequestError("unknown tokens", seen=self.suppress, allowed="ids, or -1", flag="suppress")
        if not -(2**63) <= self.seed < 2**63:
            raise RequestError("seed is out of range", seen=self.seed, allowed="64 bits", flag="seed")
        for name, least in (("beam_size", 1), ("best_of", 1)):
            if not least <= getattr(self, name) <= 64:
                raise RequestError(
                    f"{name} is out of range", seen=getattr(self, name), allowed=f"{least} to 64", flag=name
                )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError(
                "max_new_tokens must be positive", seen=self.max_new_tokens, flag="max_new_tokens"
            )
        if self.hallucination_silence_threshold is not None and not self.word_timestamps:
            raise RequestError(
                "made-up text is found by its words' times", allowed="with word_timestamps=True",
                flag="hallucination_silence_threshold",
            )  # fmt: skip
        for name in ("patience", "compression_ratio", "hallucination_silence_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(f"{name} must be positive", seen=value, flag=name)

    def _check_clips(self) -> None:
        object.__setattr__(self, "clip_timestamps", tuple(self.clip_timestamps))
        rising = all(a < b for a, b in zip(self.clip_timestamps, self.clip_timestamps[1:], strict=False))
        if not rising or not all(0 <= one < math.inf for one in self.clip_timestamps):
            raise RequestError(
                "clip_timestamps must be rising times",
                seen=self.clip_timestamps,
                allowed="seconds",
                flag="clip_timestamps",
            )
