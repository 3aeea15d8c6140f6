"""The routes, and the shape of errors."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ingot.config.allowed_hosts import HostRule
from ingot.config.server_config import ServeConfig
from ingot.models.speech_tokens import Task
from ingot.serve import request_schemas as schemas
from ingot.serve.api.chat_completions import ChatCall
from ingot.serve.api.completions import CompletionCall
from ingot.serve.api.embeddings_endpoint import EmbeddingCall
from ingot.serve.api.explain_endpoint import HEADER, ExplainedCall, wants_explanation
from ingot.serve.api.responses import ResponseCall
from ingot.serve.api.simple_chat import SimpleChat
from ingot.serve.api.tokenize_endpoint import detokenize, tokenize, tokenizer_info
from ingot.serve.api.transcriptions import TRANSCRIPTIONS, TRANSLATIONS, TranscriptionCall
from ingot.serve.api_call import ApiCall
from ingot.serve.api_errors import ApiError, bad_request, stopping, unavailable
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.http.form_bodies import Uploads, read_form
from ingot.serve.http.http_bodies import (
    ClientDisconnectedError,
    Guard,
    error_answer,
    event_stream,
    full_answer,
    json_answer,
    read_body,
    until_disconnected,
)
from ingot.serve.ignored_fields import IgnoredFields, note_ignored
from ingot.serve.openapi_page import document
from ingot.serve.picture_service import BODY_BYTES
from ingot.serve.served_model import ServedModel
from ingot.serve.speech_service import SpeechService
from ingot.version import VERSION

_SPARE = 64  # requests beyond those in the engines' queues, so that these report what is full
_DISCONNECTED = 499  # never read
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class ServerState:
    """What all requests share; no new ones are taken while ``stopping``."""

    models: dict[str, ServedModel]
    config: ServeConfig
    metrics: Metrics
    stopping: bool = False
    uploads: Uploads = field(default_factory=Uploads)

    @property
    def most_with_pictures(self) -> int:
        """Bytes of a body that may have pictures, where a model takes them."""
        taken = any(model.pictures is not None for model in self.models.values())
        return max(self.config.max_body, BODY_BYTES if taken else 0)

    def find(self, name: str | None) -> ServedModel:
        """The model of a request, by default the only one; raises ApiError where there is none of this name
        (404), none is named beside several (400), or the server is stopping (503).
        """
        if self.stopping:
            raise stopping()
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise bad_request(f"model is missing; this server has {', '.join(self.models)}", "model")
        if name not in self.models:
            text = f"no such model: {name!r:.200}; this server has {', '.join(self.models)}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return self.models[name]

    def reader(self, name: str | None) -> ServedModel:
        """``find``; raises ApiError for a speech model."""
        found = self.find(name)
        if found.speech is not None:
            text = f"{found.name} transcribes speech and takes no text; send a file to {TRANSCRIPTIONS}"
            raise bad_request(text, "model", "unsupported_parameter")
        return found

    def listener(self, name: str | None) -> SpeechService:
        """The speech service of ``find``'s model; raises ApiError for any other."""
        found = self.find(name)
        if found.speech is None:
            text = f"{found.name} does not take speech; name a model whose input_modalities have audio"
            raise bad_request(text, "model", "unsupported_parameter")
        return found.speech


def make_app(state: ServerState, api_key: str | None, hosts: HostRule | None = None) -> FastAPI:
    """The application; ``hosts``: the names that it answers to, None for any."""
    most_open = _SPARE + sum(model.engine.most_answers for model in state.models.values())
    app = bare_app(api_key, most_open, hosts)
    app.add_middleware(IgnoredFields)
    _add_answers(app, state)
    _add_speech(app, state)
    _add_simple_chat(app, state)
    _add_tokens(app, state)
    _add_facts(app, state)
    return app


def bare_app(api_key: str | None, most_open: int, hosts: HostRule | None = None) -> FastAPI:
    """An application without routes: the guard, and the shape of errors. FastAPI's own pages are off."""
    app = FastAPI(title="Ingot", version=VERSION, openapi_url=None)
    app.add_middleware(Guard, api_key=api_key, most_open=most_open, hosts=hosts)
    for kind in (ApiError, HTTPException, ClientDisconnectedError, Exception):
        app.add_exception_handler(kind, _failed)
    return app


def _add_answers(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await _json_body(request, schemas.ChatRequest, state.most_with_pictures)
        return await _respond(request, body, ChatCall(state.reader(body.model), body))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _json_body(request, schemas.CompletionRequest, state.config.max_body)
        return await _respond(request, body, CompletionCall(state.reader(body.model), body))

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = await _json_body(request, schemas.ResponsesRequest, state.most_with_pictures)
        _refuse_explanation(request)
        return await _respond(request, body, ResponseCall(state.reader(body.model), body))

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await _json_body(request, schemas.EmbeddingRequest, state.config.max_body)
        return await full_answer(request, EmbeddingCall(state.reader(body.model), body).answer())


def _add_speech(app: FastAPI, state: ServerState) -> None:
    @app.post(TRANSCRIPTIONS)
    async def transcriptions(request: Request) -> Response:
        return await speech_answer(request, "transcribe")

    @app.post(TRANSLATIONS)
    async def translations(request: Request) -> Response:
        return await speech_answer(request, "translate")

    async def speech_answer(request: Request, task: Task) -> Response:
        _refuse_explanation(request)
        reading = read_form(request, state.config.max_audio, schemas.AUDIO_LISTS)
        async with state.uploads.one() as complete, reading as form:
            complete()
            note_ignored(request, schemas.AudioRequest, form.json)
            body = schemas.decode(schemas.AudioRequest, form.json, strict=False)
            call = TranscriptionCall(state.listener(body.model), body, task, form.data)
            if body.stream:
                return await event_stream(request, call.events())
            return await until_disconnected(request, call.answer())


def _add_simple_chat(app: FastAPI, state: ServerState) -> None:
    @app.post("/chat")
    async def simple_chat(request: Request) -> Response:
        body = await _json_body(request, schemas.SimpleChatRequest, state.config.max_body)
        answer = SimpleChat(state.reader(body.model), body).answer()
        return json_answer(await until_disconnected(request, answer))

    @app.post("/stream_chat")
    async def simple_stream(request: Request) -> Response:
        body = await _json_body(request, schemas.SimpleChatRequest, state.config.max_body)
        return await event_stream(request, SimpleChat(state.reader(body.model), body).events())


def _add_tokens(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def to_tokens(request: Request) -> Response:
        body = await _json_body(request, schemas.TokenizeRequest, state.most_with_pictures)
        model = state.find(body.model)
        with model.engine.places(1):
            return json_answer(await until_disconnected(request, model.in_thread(tokenize, model, body)))

    @app.post("/detokenize")
    async def to_text(request: Request) -> Response:
        body = await _json_body(request, schemas.DetokenizeRequest, state.config.max_body)
        model = state.find(body.model)
        with model.engine.places(1):
            return json_answer(await until_disconnected(request, model.in_thread(detokenize, model, body)))


def _add_facts(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return json_answer({"object": "list", "data": [model.facts() for model in state.models.values()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_answer(state.find(name).facts())

    @app.get("/openapi.json")
    async def described() -> Response:
        return json_answer(document())

    @app.get("/tokenizer_info")
    async def info(model: str | None = None) -> Response:
        return json_answer(tokenizer_info(state.find(model)))

    @app.get("/health")
    async def health() -> Response:
        lost = {name: model.engine.lost for name, model in state.models.items() if model.engine.lost}
        if state.stopping or lost:
            text = "; ".join(f"{name}: {why}" for name, why in lost.items())
            return error_answer(unavailable("stopping" if state.stopping else text, "unhealthy"))
        return json_answer({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_answer({"version": VERSION})

    @app.get("/metrics")
    async def metrics() -> Response:
        for name, model in state.models.items():
            alive, proven = model.engine.lost is None, model.side.doubt is None
            state.metrics.of(name).state(model.engine.gauges, proven=proven, alive=alive)
        return Response(state.metrics.text(), headers={"content-type": _PROMETHEUS})


async def _json_body(request: Request, kind: type[schemas.Body], most: int) -> schemas.Body:
    """A body of this kind, whose fields that the server ignores are noted; raises ApiError."""
    data = await read_body(request, most)
    note_ignored(request, kind, data)
    return schemas.decode(kind, data)


async def _respond(request: Request, body: schemas.Sampling, call: ApiCall) -> Response:
    explained = wants_explanation(request.headers.get(HEADER))
    found = ExplainedCall(call) if explained else call
    if body.stream:
        return await event_stream(request, found.events())
    return await full_answer(request, found.answer())


def _refuse_explanation(request: Request) -> None:
    if wants_explanation(request.headers.get(HEADER)):
        raise bad_request(f"{HEADER} goes with chats and completions", HEADER)


async def _failed(request: Request, error: Exception) -> Response:
    """The answer to an error. Of a bug the log has the details, the client has none."""
    if isinstance(error, ClientDisconnectedError):
        return Response(status_code=_DISCONNECTED)
    if isinstance(error, HTTPException):  # no such path, or not with this method
        text = f"{request.method} {request.url.path:.200}: {error.detail}"
        error = ApiError(error.status_code, text, headers=dict(error.headers or {}))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal error", code="internal_error")
    return error_answer(error)
