"""Bodies with a file: ``multipart/form-data``. A file larger than a megabyte is on disk."""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from ingot.serve.api_errors import ApiError, bad_request, too_busy
from ingot.serve.http.http_bodies import ClientDisconnectedError, check_coding
from ingot.serve.http.slow_bodies import SlowBodies

FORM_SECONDS = 300.0  # for a body to arrive
_MOST_UPLOADS = 128  # each may be on disk
_MOST_FIELDS = 256
_FIELD_BYTES = 64 << 10
_CHARSETS = ("utf-8", "utf8")
_FRAME_BYTES = 1 << 20  # of a body, beside its file
_INNER = re.compile(r"(\w{1,100})\[(\w{1,100})\]")  # a field of an object, as OpenAI's clients send them
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FormBody:
    """The fields as JSON, lists and objects among them, and the file."""

    json: bytes
    file: UploadFile

    def data(self) -> bytes:
        """The file's bytes. May take a while."""
        self.file.file.seek(0)
        return self.file.file.read()


class Uploads:
    """The files that are arriving, or not decoded yet."""

    def __init__(self) -> None:
        self._open = 0
        self._bodies = SlowBodies()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Callable[[], None]]:
        """A place for one; what it yields is called when the file is complete. Raises ApiError where there is
        none (429), or the file came too slowly and another needs the place (408).
        """
        if self._open >= _MOST_UPLOADS and not self._bodies.make_room():
            raise too_busy("the server, with recordings,", self._open)
        self._open += 1
        try:
            with self._bodies.arriving() as complete:
                yield complete
        finally:
            self._open -= 1


@asynccontextmanager
async def read_form(request: Request, most: int, lists: Collection[str]) -> AsyncIterator[FormBody]:
    """The form, while it is open; its file has at most ``most`` bytes.

    Args:
        lists: fields that may be there several times, also with ``[]`` behind the name.

    Raises:
        ApiError: it is too large (413), no form by its type (415), malformed, in another
            charset than utf-8 or without one file (400), does not arrive (408), a browser sends it for the
            page of another site (403), or the disk is full (507).
        ClientDisconnectedError: the client disconnected before its end.
    """
    check_coding(request)
    kind = request.headers.get("content-type", "")
    if kind.split(";")[0].strip().lower() != "multipart/form-data":
        text = "send the recording as Content-Type: multipart/form-data"
        raise ApiError(415, text, code="unsupported_media_type")
    # The parser would decode fields and their names by any codec of Python that is named here.
    charset = parse_options_header(kind)[1].get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        text = f"Content-Type: the charset {charset[:100]!r} is not supported; send utf-8, or leave it out"
        raise bad_request(text, code="unsupported_charset")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(403, "recordings from the pages of other sites are refused", code="other_origin")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most + _FRAME_BYTES:
        raise _too_large(most)
    parser = MultiPartParser(
        request.headers,
        _bounded(request, most),
        max_files=1,
        max_fields=_MOST_FIELDS,
        max_part_size=_FIELD_BYTES,
    )
    try:
        async with asyncio.timeout(FORM_SECONDS):
            found = await parser.parse()
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="request_timeout") from None
    except MultiPartException as error:
        raise bad_request(f"the form cannot be read: {error.message}", code="invalid_form") from None
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    except OSError as error:  # no disk space, or too many open files
        _log.error("a recording cannot be kept in %s: %s", tempfile.gettempdir(), error)
        text = f"the server has no room for the recording ({error.strerror}); try again later"
        raise ApiError(507, text, param="file", code="no_room") from None
    try:
        yield _form(found.multi_items(), most, lists)
    finally:
        await found.close()


def _form(items: list[tuple[str, Any]], most: int, lists: Collection[str]) -> FormBody:
    values: dict[str, Any] = {}
    file: UploadFile | None = None
    for name, value in items:
        plain = name.removesuffix("[]")
        inner = _INNER.fullmatch(name)
        if isinstance(value, UploadFile):
            if name != "file":
                raise bad_request(f"{name:.100}: the recording goes into the field file", "file")
            file = value
        elif plain in lists:
            values.setdefault(plain, []).append(value)
        elif inner is not None and isinstance(held := values.setdefault(inner[1], {}), dict):
            held[inner[2]] = value
        elif inner is not None or name in values:
            plain = name if inner is None else inner[1]
            raise bad_request(f"{plain:.100} is there twice", plain[:100])
        elif value:
            values[name] = value
    if file is None:
        raise bad_request("send the recording as a file in the field file", "file")
    if not file.size:
        raise bad_request("the file is empty", "file")
    if file.size > most:
        raise _too_large(most)
    return FormBody(msgspec.json.encode(values), file)


async def _bounded(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    room = most + _FRAME_BYTES
    async for part in request.stream():
        room -= len(part)
        if room < 0:
            raise _too_large(most)
        yield part


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the recording is larger than {most} bytes", param="file", code="request_too_large")
