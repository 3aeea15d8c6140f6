"""A conversation with any OpenAI-compatible server, by the standard library alone."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ingot.errors import IngotError, RequestError
from ingot.text.chat.chat_turns import Question, Turn, Turns

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 600.0  # between two parts of an answer
_MOST_BYTES = 16 << 20  # of one line, and of an answer that is no stream
_API_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_FIXES = {401: "`api_key`", 403: "`api_key`", 404: "`url`, or `model`", 429: "try again later"}


class RemotePiece(NamedTuple):
    text: str
    finish_reason: str | None


class RemoteTooLongError(RequestError):
    """The server has no room for the conversation."""


class RemoteServer:
    """A server by its address, http or https (else RequestError); ``/v1`` is added where it has no path."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise RequestError("no address of a server", seen=url, allowed="http://HOST:PORT", field="url")
        self.url = url
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._path = parts.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> dict[str, list[str] | None]:
        """Its models by name, and what they read (``text``, ``image``); None where it does not say.

        Raises:
            IngotError: it cannot be reached, or refuses.
        """
        connection, response = self._sent("GET", "/models", None)
        try:
            listed = json.loads(response.read(_MOST_BYTES))["data"]
            return {str(one["id"]): one.get("input_modalities") for one in listed}
        except (ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException, OSError):
            what = "the server does not list its models"
            raise RequestError(what, seen=self.url, field="url", fix="`url`, or name one: `model`") from None
        finally:
            connection.close()

    def chat(self, body: Mapping[str, Any]) -> Generator[RemotePiece, None, None]:
        """An answer as it comes; the request is sent now.

        Raises:
            RemoteTooLongError: the messages are too long.
            IngotError: it cannot be reached, refuses, or breaks off.
        """
        connection, response = self._sent("POST", "/chat/completions", {**body, "stream": True})
        return self._pieces(connection, response)

    def _pieces(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> Generator[RemotePiece, None, None]:
        ended = False
        try:
            while line := response.readline(_MOST_BYTES):
                name, _, data = line.partition(b":")
                if name != b"data":
                    continue
                if data.strip() == b"[DONE]":
                    ended = True
                    break
                for piece in _read(json.loads(data)):
                    ended |= piece.finish_reason is not None
                    yield piece
        except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError, AttributeError) as error:
            raise IngotError("the server's answer broke off", seen=f"{self.url}: {error}") from None
        finally:
            connection.close()
        if not ended:
            raise IngotError("the server's answer broke off", seen=self.url)

    def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._kind(self._host, self._port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_SECONDS)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, data, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            answer = response.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            seen = f"{self.url}: {getattr(error, 'strerror', None) or error}"
            fix = "`url`; `ingot serve ENGINE` starts a server"
            raise IngotError("no server answers at this address", seen=seen, fix=fix) from None
        connection.close()
        raise _refusal(response.status, answer)


class RemoteConversation(Turns[RemotePiece]):
    """Turns of a user and a server's model; the oldest are dropped where the server finds them too long.

    Args:
        values: sampling values by their names in ``SamplingParams``; the server has its own for others.
    """

    def __init__(
        self, server: RemoteServer, model: str, system: str | None, values: Mapping[str, Any]
    ) -> None:
        super().__init__(system)
        self._server = server
        self._model = model
        self.set_values(values)

    def set_values(self, values: Mapping[str, Any]) -> None:
        self._body = {"model": self._model, **{_API_NAMES.get(name, name): v for name, v in values.items()}}

    def _picture(self, path: str) -> dict[str, Any]:
        from ingot.image.image_decoder import format_of
        from ingot.image.image_source import file_bytes

        reads = self._server.models().get(self._model)
        if reads is not None and "image" not in reads:
            raise RequestError(f"{self._model} takes no pictures", seen=f"it reads {', '.join(reads)}")
        _, data = file_bytes(Path(path))
        media = f"image/{format_of(data).lower()}"
        url = f"data:{media};base64,{base64.b64encode(data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    def _begin(self, question: Question) -> tuple[list[Turn], Generator[RemotePiece, None, None]]:
        kept = self.turns
        while True:
            try:
                return kept, self._server.chat({**self._body, "messages": self.messages(question, kept)})
            except RemoteTooLongError:
                if not kept:
                    raise
                kept = kept[1:]


def _read(chunk: Any) -> list[RemotePiece]:
    """The pieces of an event. Raises IngotError where it is an error, TypeError or AttributeError where it is
    no event of a chat.
    """
    if chunk.get("error"):
        raise IngotError("the server ended the answer", seen=_message(chunk))
    found = []
    for one in chunk.get("choices") or []:
        text = (one.get("delta") or {}).get("content") or ""
        if not isinstance(text, str):
            raise TypeError("content is no text")
        found.append(RemotePiece(text, one.get("finish_reason")))
    return found


def _refusal(status: int, data: bytes) -> IngotError:
    """What a status that is not 200 means."""
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    message = _message(body)
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    if status == http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # of pictures in all turns
        return RemoteTooLongError("the conversation is too large for the server", seen=message)
    if code == "context_length_exceeded" or (status == 400 and "context length" in message):
        return RemoteTooLongError("the conversation is too long for the server", seen=message)
    seen = f"{status} {message}".strip()
    return IngotError("the server refused the request", seen=seen, fix=_FIXES.get(status))


def _message(data: Any) -> str:
    """The words of an error, in OpenAI's shape or another's."""
    error = data.get("error", data) if isinstance(data, dict) else None
    found = error.get("message", "") if isinstance(error, dict) else error
    return found if isinstance(found, str) else ""
