"""Requests to an OpenAI-compatible server over HTTP."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp

from ingot.config.files.json_text import JsonError, parse_json
from ingot.errors import ConfigError, IngotError, RequestError
from ingot.measure.bench.serving.http_answer import HttpAnswer, Stream, StreamError, error_text
from ingot.measure.bench.serving.server_target import PATHS, ServerTarget

_STREAM = "text/event-stream"


@dataclass
class Client:
    """A session with one server."""

    target: ServerTarget
    _session: aiohttp.ClientSession
    facts: dict[str, Any] = field(default_factory=dict)

    async def model(self) -> str:
        """The model asked for, or the server's only one; one that lists none is not checked.

        Raises:
            ConfigError: there is no server, it wants another key, or it has no such model.
        """
        wanted = self.target.model
        try:
            async with self._session.get(f"{self.target.base}/v1/models") as response:
                status, text = response.status, await response.text(errors="replace")
                self.facts["software"] = response.headers.get("Server")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from None
        if status in (401, 403):
            self.refuse(StreamError(f"HTTP {status}", _words(text)))
        found = _models(text) if status == 200 else {}
        if not found and wanted is None:
            raise ConfigError(
                "the server lists no models", seen=f"HTTP {status}", field="model", fix="`model=NAME`"
            )
        if wanted is None and len(found) == 1:
            wanted = next(iter(found))
        if wanted is None or (found and wanted not in found):
            what = "the server has no such model" if wanted else "the server has several models"
            raise ConfigError(what, seen=wanted, allowed=", ".join(found), field="model")
        self.facts["model"] = found.get(wanted, {"id": wanted})
        return wanted

    async def send(self, body: bytes, due: float) -> HttpAnswer:
        """Send a request, planned for ``due`` (``time.perf_counter``); the answer holds a failure, too."""
        clock = time.perf_counter
        stream = Stream(clock())
        late = stream.sent - due
        try:
            await self._follow(body, stream)
            return stream.answer(late)
        except StreamError as error:
            return HttpAnswer(stream.sent, late, error=error.kind, message=error.message)
        except TimeoutError:
            message = f"not done after {self.target.timeout_s:g} s"
            return HttpAnswer(stream.sent, late, error="timeout", message=message)
        except aiohttp.ClientConnectionError as error:
            return HttpAnswer(stream.sent, late, error="connection", message=_reason(error))
        except aiohttp.ClientError as error:
            return HttpAnswer(stream.sent, late, error="broken stream", message=_reason(error))

    async def _follow(self, body: bytes, stream: Stream) -> None:
        clock = time.perf_counter
        url = self.target.base + PATHS[self.target.endpoint]
        async with self._session.post(url, data=body) as response:
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}", _words(await response.text(errors="replace")))
            if response.content_type != _STREAM:
                raise StreamError("not a stream", f"content type {response.content_type}")
            try:
                async for data in response.content.iter_any():
                    stream.feed(data, clock())
            except aiohttp.ClientError as error:
                raise StreamError("broken stream", _reason(error)) from None

    def refuse(self, error: StreamError) -> NoReturn:
        """Raise why the server cannot be measured, from the failure of one request: a ``ConfigError`` if the
        key, the model or the URL is wrong, else a ``RequestError``.
        """
        seen = f"{error.kind}: {error.message}" if error.message else error.kind
        if error.kind in ("HTTP 401", "HTTP 403"):
            fix = "`api_key`" if self.target.api_key is None else "another `api_key`"
            raise ConfigError("the server refuses the API key", seen=seen, field="api_key", fix=fix)
        if error.kind == "HTTP 404":
            fix = "`url`, `endpoint` or `model`"
            raise ConfigError(
                "the server does not know the path or the model", seen=seen, field="url", fix=fix
            )
        if error.kind == "connection":
            raise self._unreachable(error.message)
        shorter = "shorter requests; `ignore_eos=False` where the server does not know ignore_eos; `endpoint`"
        fixes = {
            "HTTP 400": shorter,
            "HTTP 422": shorter,
            "HTTP 429": "wait until the server is idle, or raise its limit",
            "not a stream": "a server that streams (server-sent events)",
        }
        fix = fixes.get(error.kind, "look at the server's log")
        raise RequestError("the server does not answer a first request", seen=seen, fix=fix)

    def _unreachable(self, error: object) -> IngotError:
        reason = _reason(error) if isinstance(error, Exception) else error
        fix = "start it (ingot serve ENGINE), or correct `url`"
        return ConfigError("no server answers", seen=f"{self.target.base} ({reason})", fix=fix, field="url")


@asynccontextmanager
async def opened(target: ServerTarget) -> AsyncIterator[Client]:
    """A client without a limit on connections. Objects of before are frozen: with PyTorch imported, each
    garbage collection would stop the client for long.
    """
    headers = {"Content-Type": "application/json"}
    if target.api_key is not None:
        headers["Authorization"] = f"Bearer {target.api_key}"
    limit = aiohttp.ClientTimeout(total=target.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=limit) as session:
        gc.collect()
        gc.freeze()
        try:
            yield Client(target, session)
        finally:
            gc.unfreeze()


def _models(text: str) -> dict[str, dict[str, Any]]:
    """What ``/v1/models`` lists, by id."""
    try:
        value = parse_json(text)
    except JsonError:
        return {}
    data = value.get("data") if isinstance(value, dict) else None
    return {str(m["id"]): m for m in data or () if isinstance(m, dict) and "id" in m}


def _words(text: str) -> str:
    try:
        return error_text(parse_json(text))
    except JsonError:
        return text.strip()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
