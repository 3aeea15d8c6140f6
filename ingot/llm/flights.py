"""Requests under way, each with what has come of it so far.

Owns the meeting of the executor's updates with the callers that wait for them: several streams and a
``generate`` may be open at once, and every step serves them all. Knows nothing of prompts as text.

    flight = flights.start(prompt_ids, params)
    while not flight.done: flights.step()
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import torch

from ingot.config.sampling import SamplingParams
from ingot.llm.outputs import AnswerAssembler, Output, Piece
from ingot.processors.tokenizer import Tokenizer
from ingot.runtime.executor import Executor, Update
from ingot.runtime.likelihood import Keep, keep_likelihood, keep_logits


class Flight:
    """One request: its answers, and the pieces that nobody has fetched yet."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        context: list[int],
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.pieces: deque[Piece] = deque()
        self.answers = [AnswerAssembler(tokenizer, params, context, i) for i in range(params.n)]

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return all(a.done for a in self.answers)

    def output(self) -> Output:
        """The finished answers."""
        return Output(self.prompt_ids, [a.answer for a in self.answers if a.done])


class Flights:
    """All requests of one executor, by id."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer | None) -> None:
        self.executor = executor
        self._tokenizer = tokenizer
        self._open: dict[str, Flight] = {}
        self._ids = itertools.count()

    def start(self, prompt_ids: list[int], params: SamplingParams, *, chat: bool = False) -> Flight:
        """Queue a request; the text continues the prompt's, or in a chat starts anew.

        Raises:
            RequestError: the executor cannot serve it.
        """
        flight = Flight(
            f"r{next(self._ids)}", prompt_ids, params, self._tokenizer, [] if chat else prompt_ids
        )
        self.executor.add(flight.request_id, prompt_ids, params)
        self._open[flight.request_id] = flight
        return flight

    def step(self) -> None:
        """Run one step and hand its news to the flights that they belong to.

        When a step fails, all flights end as aborted: the executor has dropped their requests.
        """
        try:
            updates = self.executor.step()
        except BaseException:
            for lost in self._open.values():
                lost.pieces.extend(a.abort() for a in lost.answers if not a.done)
            self._open.clear()
            raise
        for update in updates:
            flight = self._open.get(update.request_id)
            if flight is not None:
                self._deliver(flight, update)
        self._close_empty()

    def finish(self, flights: Sequence[Flight]) -> None:
        """Step until these flights are done."""
        while not all(f.done for f in flights):
            self.step()

    def cancel(self, flight: Flight) -> None:
        """Drop a flight; its request ends within this call."""
        self.executor.abort(flight.request_id)
        self._open.pop(flight.request_id, None)

    def logits(self, prompt_ids: list[int]) -> torch.Tensor:
        """float32 [num_tokens, vocab_size] on the CPU: the logits at every position of a prompt."""
        return self._kept(prompt_ids, keep_logits)

    def log_likelihood(self, prompt_ids: list[int]) -> torch.Tensor:
        """float32 [num_tokens - 1] on the CPU: the log-probability of every token but the first."""
        return self._kept(prompt_ids, keep_likelihood(prompt_ids))

    def _kept(self, prompt_ids: list[int], keep: Keep) -> torch.Tensor:
        request_id = f"r{next(self._ids)}"
        self.executor.add_logits(request_id, prompt_ids, keep)
        try:
            while not self.executor.logits_ready(request_id):
                self.step()
        except BaseException:
            self.executor.abort(request_id)
            raise
        return self.executor.take_logits(request_id)

    def _deliver(self, flight: Flight, update: Update) -> None:
        assembler = flight.answers[update.index]
        if assembler.done:
            return
        flight.pieces.append(assembler.add(update))
        if assembler.done and update.finish_reason is None:
            self.executor.abort(update.request_id, update.index)

    def _close_empty(self) -> None:
        """A beam search may end with fewer answers than asked for; the rest will never come."""
        running = self.executor.active_ids()
        for request_id, flight in list(self._open.items()):
            if request_id in running:
                continue
            del self._open[request_id]
            finished = [a for a in flight.answers if a.done]
            if not finished:  # a beam search without a single hypothesis
                flight.pieces.append(flight.answers[0].abort())
                finished = flight.answers[:1]
            flight.answers = finished
