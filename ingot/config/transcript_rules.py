"""Whisper's decoding rules as a request carries them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.config.json_config import JsonConfig
from ingot.errors import RequestError


@dataclass(frozen=True)
class TranscriptRules(JsonConfig):
    """Rules of one transcript.

    They are applied first, so log-probabilities are of the tokens that they leave. At the first position
    ``no_speech`` heads the likeliest tokens, with its probability after the token that starts the transcript.

    Attributes:
        end: the token that ends the transcript.
        no_speech: the token for no speech.
        first_timestamp: the token of 0 seconds; all later ids are timestamps.
        framed: tokens of the prompt after the one that starts the transcript (language, task).
        detect: the model chooses one of these language ids, and no other rule applies; empty: a transcript.
        suppressed: ids that never occur.
        begin_suppressed: ids that do not occur at the first position.
        timestamps: they come in pairs, never decrease, and begin the text; False: none occurs.
        last_first: the latest first timestamp, in steps; None: any.
        patience: a beam search ends with so many times ``num_beams`` hypotheses.
    """

    end: int
    no_speech: int
    first_timestamp: int
    framed: int = 0
    detect: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()
    timestamps: bool = True
    last_first: int | None = 50
    patience: float = 1.0

    def __post_init__(self) -> None:
        ids = (self.end, self.no_speech, self.first_timestamp, *self.suppressed, *self.begin_suppressed)
        if any(i < 0 for i in (*ids, *self.detect)):
            raise RequestError("ids of a transcript's rules must not be negative", field="transcript")
        if self.framed < 0:
            raise RequestError(
                "a transcript's frame cannot be negative", seen=self.framed, field="transcript"
            )
        if not 0 < self.patience < math.inf:
            raise RequestError("patience must be positive", seen=self.patience, field="patience")

    @property
    def largest(self) -> int:
        """The largest id."""
        rest = (*self.detect, *self.suppressed, *self.begin_suppressed)
        return max(self.end, self.no_speech, self.first_timestamp, *rest)
