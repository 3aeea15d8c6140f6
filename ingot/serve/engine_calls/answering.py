"""What one HTTP request asked of an engine, and its answers so far; in the event loop's thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ingot.config.sampling_params import SamplingParams
from ingot.llm.outputs import Answer, AnswerAssembler, Piece
from ingot.runtime.executor import Update
from ingot.runtime.scheduling.request import FinishReason
from ingot.runtime.selection import TokenLogprobs
from ingot.serve.api_errors import ApiError, bad_request
from ingot.serve.engine_calls.process_protocol import Logprob, News
from ingot.text.tokenizer.tokenizer import Tokenizer

MOST_LOGPROBS = 1 << 20  # in a whole answer, about 80 bytes each


def too_large(what: str, lower: str) -> ApiError:
    """The error where an answer has, or would have, more log-probabilities than are held."""
    text = f"{what} has more than {MOST_LOGPROBS} log-probabilities; lower {lower}, or ask for a stream"
    return bad_request(text, "logprobs", "answer_too_large")


@dataclass(frozen=True)
class Job:
    """A prompt, and what is wanted of it.

    Attributes:
        params: values of its answers; None: no answer is wanted.
        context: ids that the answers' text continues.
        score: as many likeliest tokens with each of the prompt's own log-probabilities.
        pooling: of its vector.
        slot: of the features that the prompt begins with.
        attend: heads whose scores over these features are wanted, and the limit of the ids among which
            log-probabilities are.
        grammar_bytes: of its compiled grammar.
        salt: of its part of the prefix cache.
        pictures: the slot of each and its place in the prompt.
    """

    ids: list[int]
    params: SamplingParams | None
    context: Sequence[int] = ()
    score: int | None = None
    pooling: str | None = None
    slot: int | None = None
    attend: tuple[list[tuple[int, int]], int] | None = None
    grammar_bytes: int = 0
    salt: str = ""
    pictures: tuple[tuple[int, int], ...] = ()


class Answering:
    """Jobs and their answers; answers are counted through all jobs (choice = job * n + index).

    Attributes:
        scores: of each job that is to be scored, once they are there.
        vectors: of each job that has a pooling or attends, once they are there, as in ``protocol.Embedded``.
        num_tokens: tokens of all answers so far.
        reused: tokens of each job's prompt that were in the prefix cache.
        started: when it began (``time.monotonic``).
        last: when the newest token of each answer came, by job and index.
    """

    def __init__(
        self, jobs: Sequence[Job], tokenizer: Tokenizer | None, *, by_piece: bool, most_unread: int
    ) -> None:
        self.jobs = jobs
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self._scored: dict[int, list[TokenLogprobs]] = {}  # so far
        self.vectors: dict[int, bytes] = {}
        self.num_tokens = 0
        self.reused: dict[int, int] = {}
        self.started = time.monotonic()
        self.last: dict[tuple[int, int], float] = {}
        self.error: ApiError | None = None
        self._assemblers: list[list[AnswerAssembler]] = [[] for _ in jobs]
        for job, own in zip(jobs, self._assemblers, strict=True):
            if job.params is not None:
                own += [
                    AnswerAssembler(tokenizer, job.params, list(job.context), i) for i in range(job.params.n)
                ]
        answers = sum(map(len, self._assemblers))
        read = (one is not None for job in jobs for one in (job.score, job.pooling, job.attend))
        self._open = answers + sum(read)
        self._by_piece = by_piece
        self._most_unread = most_unread * max(1, answers)
        self._unread: deque[tuple[int, Piece]] = deque()
        self._held = 0  # log-probabilities of a whole answer
        self._wake = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._open == 0 or self.error is not None

    def job_done(self, position: int) -> bool:
        return all(assembler.done for assembler in self._assemblers[position])

    def answers(self, position: int) -> list[Answer]:
        return [assembler.answer for assembler in self._assemblers[position]]

    def take(self, position: int, news: News) -> bool:
        """Take what a step brought; whether a stop string ended the answer ahead of the engine."""
        assembler = self._assemblers[position][news.index]
        if news.index == 0:  # the others may find what this one has just put there
            self.reused[position] = news.num_reused
        if assembler.done:  # the engine learns of a stop string one step late
            return False
        reason = None if news.finish_reason is None else FinishReason(news.finish_reason)
        logprobs = tuple(map(_logprobs, news.logprobs))
        given = news.id, news.index, news.token_ids, reason, news.stop_id, logprobs
        piece = assembler.add(Update(*given, stop_logprob=news.stop_logprob))
        self.num_tokens += len(piece.token_ids)
        if assembler.answer.logprobs and self._by_piece:
            assembler.answer.logprobs.clear()  # the pieces have them
        elif assembler.answer.logprobs:
            self._held += sum(1 + len(one.top) for one in piece.logprobs)
            if self._held > MOST_LOGPROBS:
                self.fail(too_large("the answer", "max_tokens, n or the log-probabilities per token"))
        if piece.finish_reason is not None:
            self._open -= 1
        if self._by_piece and len(self._unread) >= self._most_unread:
            self._unread.clear()
            text = f"the client left {self._most_unread} pieces of the answer unread"
            self.fail(ApiError(500, text, code="client_too_slow"))
        elif self._by_piece:
            self._unread.append((sum(map(len, self._assemblers[:position])) + news.index, piece))
            self._wake.set()
        elif self.done:
            self._wake.set()
        return assembler.done and news.finish_reason is None

    def take_scores(self, position: int, logprobs: Sequence[Logprob], *, last: bool = True) -> None:
        self._scored.setdefault(position, []).extend(map(_logprobs, logprobs))
        if last:
            self.scores[position] = self._scored.pop(position)
            self._open -= 1
            self._wake.set()

    def take_vector(self, position: int, vector: bytes) -> None:
        self.vectors[position] = vector
        self._open -= 1
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """End the request by an error; what came before it is given out first."""
        if self.error is None:
            self.error = error
            self._wake.set()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) as they come; raises ApiError where the request was ended."""
        while True:
            while self._unread:
                yield self._unread.popleft()
            if self.done:
                break
            self._wake.clear()
            await self._wake.wait()
        if self.error is not None:
            raise self.error

    async def finish(self) -> None:
        """Wait for the end; raises as ``pieces``."""
        while not self.done:
            self._wake.clear()
            await self._wake.wait()
        if self.error is not None:
            raise self.error

    async def scored(self) -> None:
        """Wait for the scores of all jobs that want them; raises as ``pieces``."""
        while not all(job.score is None or i in self.scores for i, job in enumerate(self.jobs)):
            if self.error is not None:
                raise self.error
            self._wake.clear()
            await self._wake.wait()


def _logprobs(one: Logprob) -> TokenLogprobs:
    return TokenLogprobs(one.token_id, one.logprob, one.top)
