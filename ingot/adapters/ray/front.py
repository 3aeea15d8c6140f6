"""The Ray deployment that clients reach. It holds no engine and no tokenizer; any number of it may run."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ingot.adapters.ray.merged_answers import FACTS, ReplicaAnswer, merged, take_images
from ingot.adapters.ray.ray_settings import RayArgs
from ingot.adapters.ray.relay import relayed
from ingot.adapters.ray.replica_choice import model_and_key
from ingot.serve.api_errors import ApiError
from ingot.serve.app import bare_app
from ingot.serve.http.http_bodies import read_body
from ingot.serve.picture_service import BODY_BYTES

MOST_OPEN = 1024  # requests that one front has open; replicas say before what is full
_FRESH_SECONDS = 5.0  # a replica that has sent no facts for so long is left out


class Front:
    """Routes requests to replicas, and answers from their facts."""

    def __init__(self, args: RayArgs, api_key: str | None, *engines: Any) -> None:
        """Args:
        engines: handles of the deployments of ``args.engines``.
        """
        self._args = args
        self._api_key = api_key
        self._engines = {engine.shown: handle for engine, handle in zip(args.engines, engines, strict=True)}
        self._facts: dict[str, dict[str, tuple[float, dict[str, ReplicaAnswer]]]] = {
            name: {} for name in self._engines
        }
        self._most_bytes = args.max_body  # of a body

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray."""
        app = bare_app(self._api_key, MOST_OPEN)
        app.add_route("/{path:path}", self.post, methods=["POST"])
        app.add_route("/{path:path}", self.get, methods=["GET"])
        return app

    async def note(self, model: str, replica: str, facts: dict[str, ReplicaAnswer]) -> None:
        """Called by replicas: what they answer to ``FACTS``."""
        self._facts[model][replica] = time.monotonic(), facts
        if take_images(facts["/v1/models"]):
            self._most_bytes = max(self._most_bytes, BODY_BYTES)

    async def post(self, request: Request) -> Response:
        body = await read_body(request, self._most_bytes)
        model, key = model_and_key(body, self._args.prefix_bytes)
        name = next(iter(self._engines)) if model is None else model  # its application says what is missing
        return await self._relayed(name, key, request, body)

    async def get(self, request: Request) -> Response:
        path = request.url.path
        if path in FACTS:
            oldest = time.monotonic() - _FRESH_SECONDS
            for known in self._facts.values():
                for replica in [name for name, (updated, _) in known.items() if updated < oldest]:
                    del known[replica]
            facts = self._facts.items()
            return merged(
                path, {model: {r: f[path] for r, (_, f) in known.items()} for model, known in facts}
            )
        name = request.query_params.get("model", next(iter(self._engines)))
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
        return await self._relayed(name, "", request, b"")

    async def _relayed(self, name: str, key: str, request: Request, body: bytes) -> Response:
        if name not in self._engines:
            text = f"no such model: {name!r:.200}; this server has {', '.join(self._engines)}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return await relayed(self._engines[name], name, key, request, body)
