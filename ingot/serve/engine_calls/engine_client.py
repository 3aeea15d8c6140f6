"""The server's side of an engine: its process, its requests, its restarts. Never blocks."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ingot.config.server_config import ServeConfig
from ingot.errors import IngotError
from ingot.serve.api_errors import RETRY_SECONDS, ApiError, bad_request, too_busy, unavailable
from ingot.serve.engine_calls.answering import Answering, Job
from ingot.serve.engine_calls.blank_process import BlankProcess
from ingot.serve.engine_calls.engine_run import EngineRun
from ingot.serve.engine_calls.process_protocol import (
    Abort,
    Add,
    Attend,
    Embed,
    Gauges,
    LoadEngine,
    News,
    Ready,
    ScorePrompt,
    StepNews,
)
from ingot.serve.engine_calls.restarts import RestartPolicy, folder_stamp
from ingot.serve.engine_calls.server_metrics import EngineMetrics
from ingot.serve.engine_calls.speech_windows import Windows
from ingot.text.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class EngineClient:
    """One engine.

    Attributes:
        limits: what it takes, once it is loaded.
        gauges: the executor after its last step.
        windows: where features for it are put; None: it takes none.
        lost: why it takes no requests; None while it does.
        given_up: it will not be started again; ``on_given_up`` is called then.
        started: when the process was first started, in seconds of Unix.
    """

    limits: Ready
    _run: EngineRun

    def __init__(
        self,
        name: str,
        load: LoadEngine,
        config: ServeConfig,
        metrics: EngineMetrics,
        features: tuple[int, ...] | None = None,
        blank: BlankProcess | None = None,
    ) -> None:
        self.name = name
        self.gauges = Gauges()
        self.lost: str | None = None
        self.given_up = False
        self.on_given_up: Callable[[], None] = lambda: None
        self.started = time.time()
        shared = None if blank is None else blank.windows
        self.windows = None if features is None else Windows(features, shared)
        self._load = load
        self._config = config
        self.metrics = metrics
        self._owners: dict[str, tuple[Answering, int]] = {}
        self._ids = map(str, itertools.count())
        self._taken = 0
        self._ending: ApiError | None = None
        self._watching: asyncio.Task[None] | None = None
        self._load_seconds = 0.0
        self._back_at: float | None = None  # when it is expected to take requests again

    @classmethod
    async def start(
        cls,
        name: str,
        load: LoadEngine,
        config: ServeConfig,
        metrics: EngineMetrics,
        features: tuple[int, ...] | None = None,
        restarts: RestartPolicy | None = None,
        blank: BlankProcess | None = None,
    ) -> EngineClient:
        """Start the process and wait until the engine is loaded; a cancelled start ends the process.

        Args:
            features: the shape of what a model of speech or pictures is given.
            restarts: when a process that dies is started again; None: Ray or Triton does it.
            blank: the first process, which has been started already.

        Raises:
            EngineError, OutOfMemoryError: the engine could not be loaded.
        """
        engine = cls(name, load, config, metrics, features, blank)
        stamp = folder_stamp(Path(load.path)) if restarts is not None else ""
        await engine._begin(blank)
        engine._watching = asyncio.ensure_future(engine._watch(restarts, stamp))
        return engine

    @property
    def most_answers(self) -> int:
        """How many answers it takes at once, running and waiting."""
        return self.limits.max_batch_size + self._config.max_queue

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Room for this many answers, from before their prompts are tokenized until they end. Raises ApiError
        where there is no room now (429), there never will be (400), or the engine is lost (503).
        """
        if self.lost is not None:
            raise self._unavailable()
        if count > self.most_answers:
            text = f"the request asks for {count} answers at once; {self.name} takes {self.most_answers}"
            raise bad_request(text, "n")
        if self._taken + count > self.most_answers:
            raise too_busy(self.name, self._taken)
        self._taken += count
        try:
            yield
        finally:
            self._taken -= count

    @contextmanager
    def answering(
        self, jobs: Sequence[Job], tokenizer: Tokenizer | None, *, by_piece: bool
    ) -> Iterator[Answering]:
        """Start jobs; leaving the block aborts the rest of them before the engine's next step."""
        if self.lost is not None:
            raise self._unavailable()
        if self._ending is not None:
            raise self._ending
        found = Answering(jobs, tokenizer, by_piece=by_piece, most_unread=self._config.max_unread)
        self.metrics.prompt_tokens.inc(sum(len(job.ids) for job in jobs))
        try:
            asked = list(self._asked(jobs))
            self._owners.update({message.id: (found, position) for position, message in asked})
            self._run.send(*(message for _, message in asked))
            yield found
        finally:
            self._drop(found)

    def fail_all(self, error: ApiError) -> None:
        """End every request by an error, and those that ask in several parts with their next one."""
        self._ending = error
        for answering in {owner for owner, _ in self._owners.values()}:
            answering.fail(error)
            self._drop(answering)

    async def close(self) -> None:
        """End the process, also one that is being loaded."""
        self.lost = self.lost or "the server is stopping"
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._run.close()

    async def _begin(self, blank: BlankProcess | None = None) -> None:
        """Start a process and load the engine; raises as ``start``, and OSError."""
        begin = time.monotonic()
        self._run, self.limits = await EngineRun.start(
            self.name, self._load, self.windows, blank=blank, receive=self._receive, lost=self._lose
        )
        self._load_seconds = time.monotonic() - begin

    async def _watch(self, policy: RestartPolicy | None, stamp: str) -> None:
        """See every process to its end, and start the next one as the policy says."""
        failures = 0
        while True:
            begin = time.monotonic()
            self.lost = await self._run.ended()
            _log.error("%s: %s", self.name, self.lost)
            if policy is None:
                return
            failures = 0 if time.monotonic() - begin >= policy.stable_seconds else failures
            while self.lost is not None:
                failures += 1
                delay = policy.delay(failures)
                if delay is None or not self._is_unchanged(stamp):
                    self._back_at = None
                    self.given_up = True
                    self.lost = f"{self.lost}; given up after {failures} failures in a row"
                    _log.error("%s: %s", self.name, self.lost)
                    self.on_given_up()
                    return
                await self._restart(delay, failures)

    async def _restart(self, delay: float, failures: int) -> None:
        """Start the process again after a while; ``lost`` says whether that has failed."""
        self._back_at = time.monotonic() + delay + self._load_seconds
        _log.warning("%s: starting the engine again in %g s (failure %d)", self.name, delay, failures)
        await asyncio.sleep(delay)
        self.metrics.restarted()
        try:
            await self._begin()
        except (IngotError, OSError) as error:
            self.lost = str(error)
            _log.error("%s: the engine cannot be started: %s", self.name, error)
            return
        self.lost = self._back_at = None
        _log.warning("%s: the engine takes requests again", self.name)

    def _is_unchanged(self, stamp: str) -> bool:
        """Whether the folder still has the engine whose tokenizer and limits the server knows."""
        try:
            unchanged = folder_stamp(Path(self._load.path)) == stamp
        except OSError:
            unchanged = False
        if not unchanged:
            self.lost = f"{self.lost}; its folder has changed since, so the server must be started again"
        return unchanged

    def _receive(self, step: StepNews) -> None:
        self.metrics.prefix_cache(self.gauges, step.gauges)
        self.gauges = step.gauges
        now = time.monotonic()
        self.metrics.new_tokens.inc(sum(len(one.token_ids) for one in step.news))
        for one in step.news:
            self._deliver(one, now)
        for two in step.scored:
            if two.id in self._owners:
                answering, position = self._owners[two.id]
                answering.take_scores(position, two.logprobs, last=two.last)
                if two.last:
                    del self._owners[two.id]
        for three in step.embedded:
            if three.id in self._owners:
                answering, position = self._owners.pop(three.id)
                answering.take_vector(position, three.vector)

    def _deliver(self, news: News, now: float) -> None:
        """Give news to their request; a request that cannot take them ends alone."""
        if news.id not in self._owners:
            return
        answering, position = self._owners[news.id]
        if news.error is not None:
            answering.fail(
                bad_request(news.error) if news.refused else ApiError(500, news.error, code="engine_error")
            )
        else:
            try:
                self.metrics.tokens(answering, position, news, now)
                if answering.take(position, news):
                    self._run.send(Abort(news.id, news.index))
            except Exception:
                _log.exception("the text of a request cannot be put together")
                answering.fail(ApiError(500, "the answer's text cannot be put together"))
        if answering.error is not None:
            self._drop(answering)
        elif answering.job_done(position):
            del self._owners[news.id]
            self.metrics.finished(answering, position, now)

    def _asked(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Add | ScorePrompt | Embed | Attend]]:
        """What the engine is asked for, with the position of its job."""
        for position, job in enumerate(jobs):
            salt = job.salt or (secrets.token_hex(16) if self._config.private_prefixes else "")
            if job.score is not None:
                yield position, ScorePrompt(next(self._ids), job.ids, job.score, salt)
            if job.pooling is not None:
                yield position, Embed(next(self._ids), job.ids, job.pooling, salt)
            if job.attend is not None and job.slot is not None:
                yield position, Attend(next(self._ids), job.ids, *job.attend, job.slot)
            if job.params is not None:
                params, held = job.params.to_json(), [*job.pictures]
                add = Add(next(self._ids), job.ids, params, job.slot, job.grammar_bytes, salt, held)
                yield position, add

    def _drop(self, answering: Answering) -> None:
        """End what the engine still does for a request."""
        for name in [name for name, (owner, _) in self._owners.items() if owner is answering]:
            del self._owners[name]
            self._run.send(Abort(name))

    def _unavailable(self) -> ApiError:
        """Why it takes no requests, and when to ask again."""
        seconds: int | None = RETRY_SECONDS
        if self._back_at is not None:
            seconds = max(RETRY_SECONDS, math.ceil(self._back_at - time.monotonic()))
        elif self.given_up:
            seconds = None
        return unavailable(f"{self.name}: {self.lost}", "engine_dead", seconds)

    def _lose(self, why: str) -> None:
        """The process is dead: every request ends by an error, and no other is taken."""
        self.lost = self.lost or why
        self._back_at = time.monotonic() + self._load_seconds
        self.gauges = Gauges()
        for answering in {owner for owner, _ in self._owners.values()}:
            answering.fail(ApiError(500, f"{self.name}: {self.lost}", code="engine_dead"))
        self._owners.clear()
