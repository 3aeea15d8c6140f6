"""Errors as clients of the OpenAI API expect them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ingot.errors import IngotError

RETRY_SECONDS = 1
_FIELD = re.compile(r"[a-z_]+(\[\d+\])?(\.[a-z_]+(\[\d+\])?)*")
_CLIENT_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_PARAMS = _CLIENT_NAMES | {"engine": "model", "ids": "prompt"}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error answer. ``status`` is HTTP's; below 500 the request is at fault. ``param`` is the field at
    fault, ``message`` for people, ``code`` for programs; ``headers`` of the answer may have ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """``{"error": {message, type, param, code}}``."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(field: str, what: str) -> ApiError:
    """A field that Ingot does not serve yet; ``what`` goes into "… is not supported"."""
    return bad_request(f"{field}: {what} is not supported by this server", field, "unsupported_parameter")


def queue_full(what: str) -> ApiError:
    text = f"{what}; try again later"
    return ApiError(429, text, code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)})


def too_busy(name: str, limit: int) -> ApiError:
    return queue_full(f"{name} already has {limit} requests in flight or waiting")


def unavailable(message: str, code: str, seconds: int | None = RETRY_SECONDS) -> ApiError:
    """An engine, or the whole server, takes no requests; ``seconds`` until it may, None: never."""
    headers = None if seconds is None else {"Retry-After": str(seconds)}
    return ApiError(503, message, code=code, headers=headers)


def stopping() -> ApiError:
    return unavailable("the server is stopping", "server_stopping")


def refused(error: IngotError, param: str | None = None) -> ApiError:
    """A refusal by Ingot's own checks, of ``param`` or of the field that it names, by its name in the API."""
    field = next((one for one in (error.field, error.fix) if one is not None and _FIELD.fullmatch(one)), None)
    message = str(error)
    for ours, theirs in _CLIENT_NAMES.items():
        message = message.replace(ours, theirs)
    return bad_request(message, param or _PARAMS.get(field or "", field))


def invalid_body(error: Exception) -> ApiError:
    """The answer to what decoding a body raised."""
    if isinstance(error, RecursionError):
        return bad_request("the body is nested too deeply", code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"the body is not valid JSON: {error}", code="invalid_json")
    found = re.fullmatch(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", str(error), re.S)
    text, field = found.groups() if found is not None else (str(error), None)
    field = field or None
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing is not None:
        field = f"{field}.{missing[1]}" if field else missing[1]
    return bad_request(f"{field}: {text}" if field else text, field)
