"""``/openapi.json``; bodies are described by the types that decode them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from ingot.serve import request_schemas as schemas
from ingot.serve.api.explain_endpoint import HEADER
from ingot.version import VERSION

_EXPLAINED = ("/v1/chat/completions", "/v1/completions")
_STREAMS = (*_EXPLAINED, "/v1/responses", "/stream_chat")
_POSTS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("Answer a conversation.", schemas.ChatRequest),
    "/v1/completions": ("Continue prompts.", schemas.CompletionRequest),
    "/v1/responses": ("Answer a conversation, in the shape of the newer API.", schemas.ResponsesRequest),
    "/v1/embeddings": ("Turn inputs into vectors of unit length.", schemas.EmbeddingRequest),
    "/chat": ("Answer a question with its history.", schemas.SimpleChatRequest),
    "/stream_chat": ("Stream the answer to a question with its history.", schemas.SimpleChatRequest),
    "/tokenize": ("The token ids of a prompt or a conversation.", schemas.TokenizeRequest),
    "/detokenize": ("The text of token ids.", schemas.DetokenizeRequest),
}
_FORMS = {
    "/v1/audio/transcriptions": "Write down what is said in a recording.",
    "/v1/audio/translations": "Write down in English what is said in a recording.",
}
_GETS = {
    "/v1/models": "The models of this server.",
    "/v1/models/{name}": "One model.",
    "/health": "Whether all engines take requests; needs no key.",
    "/version": "Ingot's version.",
    "/tokenizer_info": "A model's special tokens and chat template.",
    "/metrics": "Metrics for Prometheus.",
    "/openapi.json": "This document.",
}
_REF = "#/components/schemas/{name}"
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {
            "type": "string",
            "description": "What the chat format takes: system, user, assistant, tool.",
        },
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    },
    "required": ["role"],
}
_FILE = {"type": "string", "format": "binary", "description": "wav, flac, ogg or mp3"}
_FIELD = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _FIELD,
                "code": _FIELD,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


@functools.cache
def document() -> dict[str, Any]:
    kinds: list[type[msgspec.Struct]] = [*(kind for _, kind in _POSTS.values()), schemas.AudioRequest]
    _, described = msgspec.json.schema_components(kinds, ref_template=_REF)
    served = {kind.__name__: fields for kind, fields in schemas.SERVED.items()}
    for name, schema in described.items():
        _describe(schema.get("properties", {}), served.get(name, ()))
    paths: dict[str, Any] = {path: {"post": _post(path)} for path in _POSTS}
    paths |= {path: {"post": _form(path)} for path in _FORMS}
    paths |= {path: {"get": _get(path)} for path in _GETS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ingot", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**described, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _describe(properties: dict[str, Any], served: Sequence[str]) -> None:
    """Describe what the types leave open: messages, and fields that take only values that ask for nothing."""
    for name in properties.keys() & schemas.REFUSED.keys() - set(served):
        allowed: list[Any] = [None, False, 0, "", [], {}, *schemas.NOTHING.get(name, ())]
        properties[name] = {"enum": allowed, "description": f"Not supported: {schemas.REFUSED[name]}."}
    if "messages" in properties:
        found = properties["messages"]
        for one in found.get("anyOf", [found]):
            if one.get("type") == "array":
                one["items"] = _MESSAGE


def _post(path: str) -> dict[str, Any]:
    summary, kind = _POSTS[path]
    types = ["application/json", *(["text/event-stream"] if path in _STREAMS else [])]
    schema = {"$ref": _REF.format(name=kind.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    header = {"name": HEADER, "in": "header", "schema": {"enum": ["0", "1"]}}
    return {
        **_operation(summary, types),
        "requestBody": body,
        "parameters": [header] if path in _EXPLAINED else [],
    }


def _form(path: str) -> dict[str, Any]:
    """A body with a file; what is no list comes once, and numbers and booleans are text."""
    file = {"type": "object", "properties": {"file": _FILE}, "required": ["file"]}
    schema = {"allOf": [file, {"$ref": _REF.format(name=schemas.AudioRequest.__name__)}]}
    body = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    types = ["application/json", "text/plain", "text/event-stream"]
    return {**_operation(_FORMS[path], types), "requestBody": body}


def _get(path: str) -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    types = ["text/plain" if path == "/metrics" else "application/json"]
    return {**_operation(_GETS[path], types), "parameters": [name] if "{name}" in path else []}


def _operation(summary: str, types: list[str]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    responses = {"default": {"description": "An error.", "content": error}}
    content: dict[str, Any] = {one: {} for one in types}
    responses = {"200": {"description": "The answer.", "content": content}, **responses}
    return {"summary": summary, "responses": responses}
