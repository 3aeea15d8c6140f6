"""The server's side of an engine: its process, and whose news are whose.

Owns the start and the end of the process, the requests that it has, and the bound on them. Never blocks: what
comes is read at once, whatever clients do. Knows no HTTP and no text.

    engine = await EngineClient.start("pocket-chat", Load(path), config, metrics)
    with engine.places(1): ...
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec

from ingot.config.serve import ServeConfig
from ingot.errors import EngineError
from ingot.processors.tokenizer import Tokenizer
from ingot.serve.answering import Answering, Job
from ingot.serve.errors import ApiError, bad_request, too_busy, unavailable
from ingot.serve.metrics import EngineMetrics
from ingot.serve.protocol import (
    Abort,
    Add,
    Attend,
    Embed,
    Failed,
    FrameError,
    FromEngine,
    Gauges,
    Load,
    News,
    Ready,
    Score,
    Splitter,
    Step,
    ToEngine,
    frame,
)
from ingot.serve.windows import Windows

_BOOT = (
    "import json, sys; told = json.loads(sys.argv[1]); sys.path[:] = told['path']; "
    "from ingot.serve.engine_process import main; sys.exit(main(told['socket']))"
)
_ROOT = str(Path(__file__).parents[2])
_END_SECONDS = 5.0
_log = logging.getLogger(__name__)


class EngineClient(asyncio.Protocol):
    """One engine process.

    Attributes:
        limits: what it takes, once it is loaded.
        gauges: the executor after its last step.
        windows: where features for it are put; None: it takes none.
        lost: why it takes no more requests; None while it lives.
        started: when the process was started, in seconds of Unix.
    """

    limits: Ready
    _process: subprocess.Popen[bytes]
    _transport: asyncio.Transport

    def __init__(
        self, name: str, config: ServeConfig, metrics: EngineMetrics, windows: Windows | None = None
    ) -> None:
        self.name = name
        self.gauges = Gauges()
        self.lost: str | None = None
        self.started = time.time()
        self._config = config
        self._metrics = metrics
        self._splitter: Splitter[FromEngine] = Splitter(FromEngine)
        self._loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._owners: dict[str, tuple[Answering, int]] = {}
        self._ids = map(str, itertools.count())
        self._taken = 0
        self._ending: ApiError | None = None
        self.windows = windows

    @classmethod
    async def start(
        cls,
        name: str,
        load: Load,
        config: ServeConfig,
        metrics: EngineMetrics,
        features: tuple[int, int] | None = None,
    ) -> EngineClient:
        """Start the process and wait until the engine is loaded; a cancelled start ends the process.

        Args:
            features: the shape of what a model that hears is given.

        Raises:
            EngineError, OutOfMemoryError: the engine could not be loaded.
        """
        windows = None if features is None else Windows(features)
        engine = cls(name, config, metrics, windows)
        ours, theirs = socket.socketpair()
        with theirs:
            path = [os.path.abspath(entry) for entry in sys.path] + [_ROOT]
            told = json.dumps({"socket": theirs.fileno(), "path": path})
            engine._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, told],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what libraries print is no data
                pass_fds=[theirs.fileno(), *([windows.descriptor] if windows else [])],
                start_new_session=True,  # Ctrl-C is the server's, which ends its engines
            )
        await asyncio.get_running_loop().create_unix_connection(lambda: engine, sock=ours)
        engine._send(msgspec.structs.replace(load, features=windows and windows.told))
        try:
            engine.limits = await engine._loaded
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def most_answers(self) -> int:
        """How many answers it takes at once, running and waiting."""
        return self.limits.max_batch_size + self._config.max_queue

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Room for this many answers, from before their prompts are tokenized until they end.

        Raises:
            ApiError: there is no room now (429), there never will be (400), or the engine is lost (503).
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
        """Start jobs; leaving the block ends what is left of them before the engine's next step."""
        if self.lost is not None:
            raise self._unavailable()
        if self._ending is not None:
            raise self._ending
        found = Answering(jobs, tokenizer, by_piece=by_piece, most_unread=self._config.max_unread)
        self._metrics.prompt_tokens.inc(sum(len(job.ids) for job in jobs))
        try:
            asked = list(self._asked(jobs))
            self._owners.update({message.id: (found, position) for position, message in asked})
            # In one piece: the engine's next step has all of them.
            self._transport.write(b"".join(frame(message) for _, message in asked))
            yield found
        finally:
            self._drop(found)

    def count_recording(self, seconds: float) -> None:
        """A recording has been transcribed by this engine."""
        self._metrics.heard(seconds)

    def fail_all(self, error: ApiError) -> None:
        """End every request by an error, and those that ask in several parts with their next one."""
        self._ending = error
        for answering in {owner for owner, _ in self._owners.values()}:
            answering.fail(error)
            self._drop(answering)

    async def close(self) -> None:
        """End the process: the closed socket tells it, and a signal if it does not listen, or still loads."""
        self.lost = self.lost or "the server is stopping"
        self._transport.abort()
        if self._loaded.cancelled():
            self._process.kill()
        for _ in range(int(_END_SECONDS / 0.05)):
            if self._process.poll() is not None:
                return
            await asyncio.sleep(0.05)
        self._process.kill()
        self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._splitter.feed(data):
                self._heard(message)
        except FrameError as error:
            self._lose(f"the engine's process sent {error}")
            self._process.kill()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose("the engine's process has ended")

    def _heard(self, message: FromEngine) -> None:
        match message:
            case Step(news, scored, gauges, embedded):
                self._metrics.prefix_cache(self.gauges, gauges)
                self.gauges = gauges
                now = time.monotonic()
                self._metrics.new_tokens.inc(sum(len(one.token_ids) for one in news))
                for one in news:
                    self._deliver(one, now)
                for two in scored:
                    if two.id in self._owners:
                        answering, position = self._owners.pop(two.id)
                        answering.take_scores(position, two.logprobs)
                for three in embedded:
                    if three.id in self._owners:
                        answering, position = self._owners.pop(three.id)
                        answering.take_vector(position, three.vector)
            case Ready():
                self._loaded.set_result(message)
            case Failed():
                if not self._loaded.done():
                    self._loaded.set_exception(message.error())
                    self.lost = message.what  # whoever starts it tells
                self._lose(str(message.error()))

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
                self._metrics.tokens(answering, position, news, now)
                if answering.take(position, news):
                    self._send(Abort(news.id, news.index))
            except Exception:
                _log.exception("the text of a request cannot be put together")
                answering.fail(ApiError(500, "the answer's text cannot be put together"))
        if answering.error is not None:
            self._drop(answering)
        elif answering.job_done(position):
            del self._owners[news.id]
            self._metrics.finished(answering, position, now)

    def _asked(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Add | Score | Embed | Attend]]:
        """What the engine is asked for, with the position of its job."""
        for position, job in enumerate(jobs):
            if job.score is not None:
                yield position, Score(next(self._ids), job.ids, job.score)
            if job.pooling is not None:
                yield position, Embed(next(self._ids), job.ids, job.pooling)
            if job.attend is not None and job.slot is not None:
                yield position, Attend(next(self._ids), job.ids, *job.attend, job.slot)
            if job.params is not None:
                yield position, Add(next(self._ids), job.ids, job.params.to_json(), job.slot)

    def _drop(self, answering: Answering) -> None:
        """End what the engine still does for a request."""
        for name in [name for name, (owner, _) in self._owners.items() if owner is answering]:
            del self._owners[name]
            self._send(Abort(name))

    def _unavailable(self) -> ApiError:
        return unavailable(f"{self.name}: {self.lost}", "engine_dead")

    def _send(self, message: ToEngine) -> None:
        self._transport.write(frame(message))

    def _lose(self, why: str) -> None:
        """The engine is dead: every request ends by an error, and no other is taken."""
        if self.lost is None:
            self.lost = why
            _log.error("%s: %s", self.name, why)
        if not self._loaded.done():
            self._loaded.set_exception(EngineError(f"{self.name}: {why}", fix="see what it wrote above"))
        for answering in {owner for owner, _ in self._owners.values()}:
            answering.fail(ApiError(500, f"{self.name}: {self.lost}", code="engine_dead"))
        self._owners.clear()
