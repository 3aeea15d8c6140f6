"""What a caller gets back, and how it is assembled from the executor's updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.executor import Update
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.runtime.scheduling.request import FinishReason
from ingot.text.stop_strings import StopStrings
from ingot.text.tokenizer.detokenizer import IncrementalDetokenizer
from ingot.text.tokenizer.tokenizer import Tokenizer

Reason = Literal["stop", "length", "abort"]
_LATE = 256  # tokens whose text is found at once at most: others' steps wait for it


@dataclass
class Answer:
    """One answer to a prompt.

    ``text`` is None without a tokenizer. ``finish_reason`` is ``stop`` (by the end token or stop string in
    ``stopped_by``), ``length`` or ``abort``. ``token_ids`` hold no end token; ``stop_logprob`` is its
    log-probability where these are wanted. ``score`` is a beam's.
    """

    text: str | None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: Reason | None = None
    stopped_by: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    stop_logprob: float | None = None
    score: float | None = None


@dataclass
class Output:
    """A prompt and its answers (``n`` of them); ``text``, ``token_ids`` … are those of the first."""

    prompt_token_ids: list[int]
    answers: list[Answer]

    @property
    def text(self) -> str | None:
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> Reason | None:
        return self.answers[0].finish_reason

    @property
    def stopped_by(self) -> int | str | None:
        return self.answers[0].stopped_by

    @property
    def score(self) -> float | None:
        return self.answers[0].score

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.answers[0].logprobs


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer: text that is certain by now, the tokens since the last piece, and, in the
    last piece, why the answer ended. ``index`` counts the answers."""

    text: str
    token_ids: tuple[int, ...] = ()
    index: int = 0
    finish_reason: Reason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class AnswerAssembler:
    """Builds one answer, and its pieces, from updates; its text continues that of the ``context`` ids."""

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, context: list[int], index: int = 0
    ) -> None:
        self.answer = Answer("" if tokenizer else None, logprobs=None if params.logprobs is None else [])
        self._index = index
        self._detokenizer = IncrementalDetokenizer(tokenizer, context) if tokenizer else None
        self._stops = StopStrings(params.stop)
        self._params = params
        self._reads_late = not params.stop and (tokenizer is None or tokenizer.joins_bytes)
        self._unread: list[int] = []  # tokens whose text is found later

    @property
    def done(self) -> bool:
        return self.answer.finish_reason is not None

    def add(self, update: Update) -> Piece:
        """What an update adds. After a stop string ``done`` is true before the executor ends the answer."""
        text, kept = self._read(update.token_ids)
        text, logprobs = self._take(update, text, kept)
        return Piece(text, tuple(kept), self._index, self.answer.finish_reason, logprobs)

    def keep(self, update: Update) -> None:
        """``add`` for a call that streams nothing. The text of many tokens is found at once, in a tenth of
        the time, unless a stop string may end it or the tokenizer decodes token by token anyway.
        """
        if not self._reads_late:
            self.add(update)
            return
        self._unread += update.token_ids
        text = self._read_late() if len(self._unread) >= _LATE else ""
        self._take(update, text, update.token_ids)

    def _take(self, update: Update, text: str, kept: Sequence[int]) -> tuple[str, tuple[TokenLogprobs, ...]]:
        """Add tokens and their text to the answer; returns the text with what an end adds, and the tokens'
        log-probabilities.
        """
        answer = self.answer
        answer.token_ids += kept
        answer.score, answer.stop_logprob = update.score, update.stop_logprob
        logprobs = update.logprobs[: len(kept)]
        if answer.logprobs is not None:
            answer.logprobs += logprobs
        if update.finish_reason is not None and not self.done:
            text += self._finish(update.finish_reason, update.stop_id)
        if text and answer.text is not None:
            answer.text += text
        return text, logprobs

    def abort(self) -> Piece:
        text = self._finish(FinishReason.ABORT, None)
        if self.answer.text is not None:
            self.answer.text += text
        return Piece(text, (), self._index, self.answer.finish_reason)

    def _read(self, token_ids: tuple[int, ...]) -> tuple[str, list[int]]:
        """Text that the tokens add up to a stop string, and the tokens up to there."""
        if self._detokenizer is None:
            return "", list(token_ids)
        text, kept = "", []
        for token in token_ids:
            kept.append(token)
            safe, hit = self._stops.feed(self._detokenizer.add([token]))
            text += safe
            if hit is not None:
                self._end("stop", hit)
                break
        return text, kept

    def _read_late(self) -> str:
        """Text that the unread tokens add."""
        text = "" if self._detokenizer is None else self._detokenizer.add(self._unread)
        self._unread.clear()
        return text

    def _finish(self, reason: FinishReason, stop_id: int | None) -> str:
        """End the answer; returns text that was held back."""
        text = self._read_late()
        if self._detokenizer is not None:
            last, hit = self._stops.feed(self._detokenizer.flush())
            text += last
            if hit is not None:
                self._end("stop", hit)
                return text
            text += self._stops.flush()
        self._end(reason.value, stop_id)
        return text

    def _end(self, reason: Reason, stopped_by: int | str | None) -> None:
        self.answer.finish_reason = reason
        self.answer.stopped_by = stopped_by
