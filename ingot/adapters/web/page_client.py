"""The page's client of an OpenAI-compatible server; errors are in words for the reader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ingot.adapters.web.page_messages import transcript

_CONNECT_SECONDS = 5.0
_SILENCE_SECONDS = 600.0  # a request may wait in the server's queue
_MOST_SHOWN = 1000  # characters of a server's message
_NO_CHUNK = "The server sent what is no chunk of an answer."
_BAD_KEY = "The server refused the key. Start the page with the server's key in INGOT_API_KEY."


class AnswerError(Exception):
    """Why an answer failed or broke off, in words for the reader of the page."""


class ConversationTooLongError(AnswerError):
    """The server has no room for the conversation."""


@dataclass(frozen=True)
class ListedModel:
    """A model that the server lists.

    Attributes:
        max_len: tokens of prompt and answer; None: the server does not say.
        inputs: what it takes beside text, of ``input_modalities``: ``image``, ``audio``.
        is_speech: it takes recordings alone, and is asked for transcripts.
    """

    name: str
    max_len: int | None = None
    inputs: frozenset[str] = frozenset()
    is_speech: bool = False


@dataclass(frozen=True)
class TextDelta:
    """What a chunk adds to the thoughts and to the answer."""

    thought: str = ""
    text: str = ""


class Api:
    """An OpenAI-compatible server. ``base``: its URL without ``/v1``; ``key``: for ``Authorization:
    Bearer``.
    """

    def __init__(self, base: str, key: str | None) -> None:
        self._base = base
        self._client = httpx.AsyncClient(
            base_url=base,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def models(self) -> list[ListedModel]:
        """The models that the server lists; raises AnswerError where there are none."""
        try:
            response = await self._client.get("/v1/models", timeout=_CONNECT_SECONDS)
            if response.status_code != httpx.codes.OK:
                raise _refusal(response)
            found = []
            for one in response.json()["data"]:
                length, inputs = one.get("max_model_len"), frozenset(one.get("input_modalities") or ())
                length = length if isinstance(length, int) else None
                found.append(ListedModel(one["id"], length, inputs - {"text"}, inputs == {"audio"}))
        except httpx.HTTPError as error:
            raise self._away(error) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise AnswerError(f"{self._base} lists no models: is it an OpenAI-compatible server?") from None
        if not found:
            raise AnswerError("The server lists no models.")
        return found

    async def answer(self, body: Mapping[str, Any]) -> AsyncGenerator[TextDelta, None]:
        """The answer to a chat as it comes; closing the iterator ends it on the server too.

        Raises:
            ConversationTooLongError: the conversation is longer than the model's context.
            AnswerError: it failed, or ended early.
        """
        try:
            sent = self._client.stream("POST", "/v1/chat/completions", json={**body, "stream": True})
            async with sent as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise _refusal(response)
                ended = False
                async for line in response.aiter_lines():
                    choice = _choice(line)
                    if choice:
                        yield _delta(choice)
                        ended = ended or choice.get("finish_reason") is not None
                if not ended:
                    raise AnswerError("The server ended the answer early.")
        except httpx.HTTPError as error:
            raise self._away(error) from None

    async def transcripts(self, model: str, files: Sequence[Path]) -> AsyncGenerator[TextDelta, None]:
        """Transcripts of recordings, one after another; raises as ``answer``."""
        for number, file in enumerate(files):
            try:
                fields = {"model": model, "response_format": "verbose_json"}
                given = {"file": (file.name, await asyncio.to_thread(file.read_bytes))}
                response = await self._client.post("/v1/audio/transcriptions", data=fields, files=given)
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response)
                yield TextDelta(text=("\n\n---\n\n" if number else "") + transcript(response.json()))
            except httpx.HTTPError as error:
                raise self._away(error) from None
            except (ValueError, KeyError, TypeError, AttributeError):
                raise AnswerError("The server sent what is no transcript.") from None

    def _away(self, error: httpx.HTTPError) -> AnswerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return AnswerError(f"No server answers at {self._base}. Is it running?")
        if isinstance(error, httpx.TimeoutException):
            return AnswerError("The server did not answer in time.")
        return AnswerError("The connection to the server was lost.")


def _choice(line: str) -> dict[str, Any]:
    """The first choice of an event; of other lines, nothing."""
    name, _, data = line.partition(":")
    if name != "data" or data.strip() == "[DONE]":
        return {}
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise AnswerError(_message(chunk) or "The server failed.")
        choice = chunk["choices"][0] if chunk.get("choices") else {}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise AnswerError(_NO_CHUNK) from None
    if not isinstance(choice, dict):
        raise AnswerError(_NO_CHUNK)
    return choice


def _delta(choice: Mapping[str, Any]) -> TextDelta:
    delta = choice.get("delta") or {}
    if not isinstance(delta, Mapping):
        raise AnswerError(_NO_CHUNK)
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    text = delta.get("content") or ""
    if not isinstance(thought, str) or not isinstance(text, str):
        raise AnswerError(_NO_CHUNK)
    return TextDelta(thought, text)


def _refusal(response: httpx.Response) -> AnswerError:
    """A status that is not 200, in words."""
    status, wait = response.status_code, response.headers.get("retry-after")
    try:
        body = response.json()
    except ValueError:
        body = None
    message = _message(body)
    if status == httpx.codes.UNAUTHORIZED:
        return AnswerError(_BAD_KEY)
    again = f" Try again in {wait} s." if wait and wait.isdecimal() else ""
    if status == httpx.codes.TOO_MANY_REQUESTS:
        return AnswerError(f"The server is busy: {message or 'too many requests'}.{again}")
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    too_large = status == httpx.codes.REQUEST_ENTITY_TOO_LARGE  # of pictures in all turns
    is_too_long = (
        code == "context_length_exceeded" or "context length" in message
    )  # some say so in words alone
    kind = ConversationTooLongError if too_large or is_too_long else AnswerError
    return kind(f"The server refused the request ({status}): {message or response.reason_phrase}.{again}")


def _message(body: Any) -> str:
    """``error.message`` of an OpenAI error, without a full stop."""
    error = body.get("error") if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return text.strip().removesuffix(".")[:_MOST_SHOWN] if isinstance(text, str) else ""
