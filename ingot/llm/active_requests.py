"""Requests in flight, each with its results so far; all in one thread (``engine_loop.py``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.errors import EngineError
from ingot.llm.outputs import AnswerAssembler, Output, Piece
from ingot.runtime.executor import Executor, Update
from ingot.runtime.likelihood import Keep
from ingot.runtime.scheduling.inputs import RequestInput
from ingot.runtime.step.cross_scores import Head
from ingot.text.grammar.grammar_compiler import GrammarMatcher
from ingot.text.tokenizer.tokenizer import Tokenizer

News = list[tuple[int, Piece]] | BaseException | None


class ActiveRequest:
    """One request for answers, which ``Admission.check`` has taken; the text continues that of the
    ``context`` ids.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        context: list[int],
        inputs: Sequence[RequestInput] = (),
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.prompt_ids = prompt_ids
        self._matcher = matcher
        self.answers = [AnswerAssembler(tokenizer, params, context, i) for i in range(params.n)]
        self._params = params
        self._inputs = inputs

    def add_to(self, executor: Executor, request_id: str) -> None:
        given = (self.prompt_ids, self._params, self._inputs, self._matcher)
        executor.add(request_id, *given, checked=True)

    def take(self, update: Update, *, by_piece: bool) -> tuple[Piece | None, bool]:
        """What an update adds, None unless ``by_piece``; and whether a stop string ended its answer before
        the executor did.
        """
        assembler = self.answers[update.index]
        piece = None
        if by_piece:
            piece = assembler.add(update)
        else:
            assembler.keep(update)
        return piece, assembler.done and update.finish_reason is None

    def close(self, executor: Executor, request_id: str) -> list[Piece]:
        """Pieces when the executor has ended the request. A beam search may end with fewer answers than asked
        for; if there is none, the first is aborted.
        """
        finished = [a for a in self.answers if a.done]
        self.answers = finished or self.answers[:1]
        return [] if finished else [self.answers[0].abort()]

    @property
    def done(self) -> bool:
        return all(answer.done for answer in self.answers)

    def output(self) -> Output:
        return Output(self.prompt_ids, [a.answer for a in self.answers])


class LogitsRequest:
    """A prompt that is only read: ``kept`` is what ``keep`` leaves of its logits (or last ``hidden`` states)
    at every position, ``scores`` are those of ``heads`` of cross-attention, float32 [tokens, heads,
    positions].
    """

    def __init__(
        self,
        prompt_ids: list[int],
        keep: Keep,
        inputs: Sequence[RequestInput] = (),
        *,
        hidden: bool = False,
        heads: Sequence[Head] = (),
    ) -> None:
        self.kept = self.scores = torch.empty(0)
        self._hidden = hidden
        self._heads = heads
        self._prompt_ids = prompt_ids
        self._keep = keep
        self._inputs = inputs

    def add_to(self, executor: Executor, request_id: str) -> None:
        given = (self._prompt_ids, self._keep, self._inputs, self._heads)
        executor.add_reading(request_id, *given, hidden=self._hidden)

    def take(self, update: Update, *, by_piece: bool) -> tuple[Piece | None, bool]:
        """An empty piece: there is no text."""
        return Piece("") if by_piece else None, False

    def close(self, executor: Executor, request_id: str) -> list[Piece]:
        reading = executor.take_reading(request_id)
        self.kept, self.scores = reading.kept, reading.scores
        return []


@dataclass(eq=False)
class Call:
    """Requests of one caller.

    Attributes:
        post: takes the call's news, in the stepping thread; must not block. News are pieces, each with its
            request's position, if ``by_piece``; at the end None, or the error that ended the call.
        num_threads: PyTorch's threads that the caller wants on a CPU.
        ended: its last news are posted, or it was cancelled.
    """

    requests: Sequence[ActiveRequest | LogitsRequest]
    post: Callable[[News], None]
    by_piece: bool = False
    num_threads: int = field(default_factory=torch.get_num_threads)
    ended: bool = False


class ActiveRequests:
    """All calls of one executor. Steps are wanted while any of them waits for news."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._open: dict[Call, dict[str, int]] = {}  # the requests of each call that have not ended
        self._owner: dict[str, tuple[Call, int]] = {}
        self._waiting: set[Call] = set()
        self._ids = itertools.count()
        self._num_ended = executor.num_ended  # when calls were last looked through

    @property
    def wanted(self) -> bool:
        return bool(self._waiting)

    def start(self, call: Call) -> None:
        """Queue a call's requests; all of them join the same step, as far as it has room."""
        if torch.get_num_threads() != call.num_threads:
            torch.set_num_threads(call.num_threads)
        self._open[call] = {}
        try:
            for position, request in enumerate(call.requests):
                request_id = f"r{next(self._ids)}"
                request.add_to(self._executor, request_id)
                self._open[call][request_id] = position
                self._owner[request_id] = call, position
        except BaseException as error:
            self._fail(call, error)
        else:
            self._close_ended([call])

    def wait(self, call: Call) -> None:
        """Take steps until the call has news."""
        if call in self._open:
            self._waiting.add(call)

    def cancel(self, call: Call) -> None:
        call.ended = True
        for request_id in self._open.pop(call, ()):
            del self._owner[request_id]
            self._executor.abort(request_id)
        self._waiting.discard(call)

    def close(self) -> None:
        """End all calls: each gets an error. Then wait for the device: the executor may be dropped."""
        for call in list(self._open):
            self._fail(call, EngineError("the LLM was closed before the answer"))
        self._executor.wait_for_device()

    def step(self) -> None:
        """Run one step and post its news. When it fails, the executor has dropped all requests: every call
        gets the error.
        """
        try:
            updates = self._executor.step()
        except BaseException as error:
            for call in list(self._open):
                self._fail(call, error)
            return
        news: dict[Call, list[tuple[int, Piece]]] = {}
        for update in updates:
            if update.request_id in self._owner:
                call, position = self._owner[update.request_id]
                try:
                    if update.error is not None:
                        raise update.error
                    piece, cut = call.requests[position].take(update, by_piece=call.by_piece)
                    if cut:
                        self._executor.abort(update.request_id, update.index)
                    if piece is not None:
                        news.setdefault(call, []).append((position, piece))
                except Exception as error:
                    self._fail(call, error)
        for call, pieces in news.items():
            if call in self._open:
                self._post(call, pieces)
        if self._num_ended != self._executor.num_ended:  # in most steps none has
            self._num_ended = self._executor.num_ended
            self._close_ended(list(self._open))

    def _close_ended(self, calls: list[Call]) -> None:
        running = self._executor.active_ids()
        for call in calls:
            last: list[tuple[int, Piece]] = []
            for request_id, position in list(self._open[call].items()):
                if request_id not in running:
                    del self._open[call][request_id], self._owner[request_id]
                    request = call.requests[position]
                    last += [(position, piece) for piece in request.close(self._executor, request_id)]
            if last and call.by_piece:
                self._post(call, last)
            if not self._open.get(call, True):
                self.cancel(call)
                self._post(call, None)

    def _fail(self, call: Call, error: BaseException) -> None:
        self.cancel(call)
        self._post(call, error)

    def _post(self, call: Call, news: News) -> None:
        """Post news; a caller that cannot take them (its event loop is closed) has disconnected."""
        self._waiting.discard(call)
        try:
            call.post(news)
        except Exception:
            self.cancel(call)
