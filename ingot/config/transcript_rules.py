"""What a transcript may consist of, token by token.

Covers the values of Whisper's decoding rules as a request carries them.

    TranscriptRules(end=50257, no_speech=50362, first_timestamp=50364, framed=2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.config.json_config import JsonConfig
from ingot.errors import RequestError


@dataclass(frozen=True)
class TranscriptRules(JsonConfig):
    """Rules of one transcript.

    They come before everything else that chooses tokens, so log-probabilities are of what they leave. Among
    the likeliest tokens of the first place ``no_speech`` stands first, with what the model gave it behind the
    token that starts the transcript.

    Attributes:
        end: the token that ends the transcript.
        no_speech: the token that says that nobody speaks.
        first_timestamp: that of 0 seconds; all ids from it on are timestamps.
        framed: tokens of the prompt behind the one that starts the transcript (language, task).
        detect: the model chooses of these ids, of languages, and no other rule holds; empty: a transcript.
        suppressed: ids that never occur.
        begin_suppressed: ids that do not occur at the first place.
        timestamps: they come in pairs, never fall, and begin the text; False: none occurs.
        last_first: most steps of the first timestamp; None: any.
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
