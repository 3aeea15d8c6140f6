"""A Ray replica: an engine's process and its application. It ends with its engine, and Ray starts another."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, MutableMapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ingot.adapters.ray.merged_answers import FACTS, ReplicaAnswer
from ingot.adapters.ray.ray_settings import EngineArgs
from ingot.config.server_config import ServeConfig
from ingot.serve.app import ServerState, make_app
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.garbage_collection import leave_out_what_is_loaded
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.grammar_checks import GrammarChecks
from ingot.serve.served_model import ServedModel, TextSide

Message = MutableMapping[str, Any]
_TELL_SECONDS = 1.0
_LAST_SECONDS = 0.5  # for the errors of open streams to be read
_log = logging.getLogger(__name__)


class EngineReplica:
    async def __init__(self, name: str, args: EngineArgs, config: ServeConfig, front: str) -> None:  # type: ignore[misc]
        """Load the engine, or raise EngineError, CheckpointError or OutOfMemoryError. ``front``: the
        deployment that receives the facts.
        """
        side = TextSide.read(name, Path(args.path))
        side.check_proof(unproven=args.unproven, allow="set unproven: true")
        metrics = Metrics()
        self._engine = await EngineClient.start(name, args.load(), config, metrics.of(name), side.features)
        model = ServedModel(side, self._engine, GrammarChecks())
        self._app = make_app(ServerState({name: model}, config, metrics), None)
        leave_out_what_is_loaded()
        self._telling = asyncio.ensure_future(self._broadcast_facts(serve.get_deployment_handle(front)))

    async def answer(self, scope: Message, body: bytes) -> AsyncGenerator[list[Message], None]:
        """What the application sends, in order; messages that wait come together. An empty list comes first:
        the request is taken. Closing the generator ends the request. Raises as ``check_health``, before the
        answer.
        """
        self.check_health()
        yield []
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        running = asyncio.ensure_future(self._run(scope, body, sent))
        try:
            batch = [await sent.get()]
            self.check_health()
            while batch[-1] is not None:
                while not sent.empty():
                    batch.append(sent.get_nowait())
                yield [message for message in batch if message is not None]
                if batch[-1] is not None:
                    batch = [await sent.get()]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if self._engine.lost is not None:
                self._end()

    def check_health(self) -> None:
        """Called by Ray; raises RuntimeError where the engine is lost, and the replica ends."""
        if self._engine.lost is not None:
            self._end()
            raise RuntimeError(f"{self._engine.name}: {self._engine.lost}")

    async def _broadcast_facts(self, front: Any) -> None:
        """Send the facts to all fronts every second: a question through Ray would wait behind the requests of
        a full replica.
        """
        replica = serve.get_replica_context().replica_id.unique_id
        while self._engine.lost is None:
            try:
                facts = {path: await self._full_answer(path) for path in FACTS}
                responses = front.broadcast("note", self._engine.name, replica, facts)
                await responses.results_async(timeout_s=10 * _TELL_SECONDS, return_exceptions=True)
            except (RayError, RayServeException, TimeoutError) as error:
                _log.debug("no front listens: %s", error)  # it may not have started
            except Exception:  # a replica without facts looks dead, so try again
                _log.exception("cannot send facts to the fronts")
            await asyncio.sleep(_TELL_SECONDS)

    async def _full_answer(self, path: str) -> ReplicaAnswer:
        """The application's answer to GET."""
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        await self._run(scope, b"", sent)
        start, *rest = iter(sent.get_nowait, None)
        return ReplicaAnswer(start["status"], dict(start["headers"]), b"".join(one["body"] for one in rest))

    async def _run(self, scope: Message, body: bytes, sent: asyncio.Queue[Message | None]) -> None:
        """Run the application; None is the last that is sent."""
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for message in received:
                return message
            return await asyncio.get_running_loop().create_future()  # a disconnect cancels it

        try:
            await self._app(scope, receive, sent.put)
        except Exception:
            _log.exception("an answer failed")
        finally:
            sent.put_nowait(None)

    def _end(self) -> None:
        """End this process soon: routers then leave it out at once, and Ray starts another."""
        asyncio.get_running_loop().call_later(_LAST_SECONDS, os._exit, 1)
