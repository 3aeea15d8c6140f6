"""The bytes of a picture given as a path, an open file or a data URL."""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path
from typing import IO

from ingot.errors import RequestError
from ingot.image.image_worker import MOST_BYTES

File = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes]
SOURCES = (
    "a path, a data URL, a file's bytes, a file that is open for reading bytes, a PIL image, "
    "or an array [3, height, width]"
)
_DATA_URL = re.compile(r"data:([^,]*),", re.IGNORECASE)
_REMOTE = re.compile(r"(https?|ftp)://", re.IGNORECASE)
_SHOWN = 100  # characters of a text that is no path


def file_bytes(source: File) -> tuple[str, bytes]:
    """The name for errors, and the bytes. Raises ``RequestError`` if there is no such file, it is too large,
    or this is no file.
    """
    if isinstance(source, str) and _DATA_URL.match(source):
        return "the data URL", _of_data_url(source)
    if isinstance(source, str) and _REMOTE.match(source):
        what = "pictures are not fetched from the network here"
        fix = "read the file first, and give its bytes"
        raise RequestError(what, seen=source[:_SHOWN], allowed=SOURCES, fix=fix)
    if isinstance(source, str | os.PathLike):
        return _of_path(source)
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        _check_bytes(len(data))
        return "the bytes", data
    if not callable(getattr(source, "read", None)):
        raise RequestError("this is no picture", seen=type(source).__name__, allowed=SOURCES)
    try:
        return "the file", _read(source)
    except RequestError:
        raise
    except (OSError, ValueError) as error:
        raise RequestError(f"the file cannot be read ({error})", seen=type(source).__name__) from None


def _of_path(source: str | os.PathLike[str]) -> tuple[str, bytes]:
    name = str(os.fspath(source))
    fix = "another path"
    try:
        with Path(source).open("rb") as stream:
            return name, _read(stream)
    except RequestError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        if os.path.isdir(source):
            raise RequestError("this is a folder, and no picture", seen=name, fix="a file in it") from None
        raise RequestError("there is no such picture", seen=name[: _SHOWN * 10], fix=fix) from None
    except OSError as error:
        what = f"the picture cannot be read ({error.strerror})"
        raise RequestError(what, seen=name[:_SHOWN], fix=fix) from None
    except ValueError as error:  # a zero byte, or half of a character
        raise RequestError(f"this is no path ({error})", seen=ascii(name[:_SHOWN]), fix=fix) from None


def _read(stream: IO[bytes]) -> bytes:
    """The rest of a stream, within the limit: a device may have no end."""
    parts: list[bytes] = []
    count = 0
    while part := stream.read(MOST_BYTES + 1 - count):
        if not isinstance(part, bytes | bytearray):
            seen, fix = f"{type(stream).__name__} of text", 'open it for reading bytes: "rb"'
            raise RequestError("this is no picture", seen=seen, allowed=SOURCES, fix=fix)
        parts.append(bytes(part))
        count += len(part)
        _check_bytes(count)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _of_data_url(url: str) -> bytes:
    found = _DATA_URL.match(url)
    assert found is not None
    fix = "data:image/png;base64, and then the file in base64"
    if not found[1].lower().rstrip().endswith(";base64"):
        raise RequestError("the data URL is not in base64", seen=found[0][:_SHOWN], fix=fix)
    _check_bytes((len(url) - found.end()) * 3 // 4)
    try:
        text = _unquoted(url[found.end() :].encode("ascii"))
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError("the data URL is not in base64", seen=str(error), fix=fix) from None


def _unquoted(data: bytes) -> bytes:
    """Base64 without percent-encoding and spaces. ``urllib.parse.unquote`` would take 100 times the memory of
    the text, a string for every escape.
    """
    if b"%" in data:
        for char in b"+/= \t\r\n":
            for code in {f"%{char:02X}".encode(), f"%{char:02x}".encode()}:
                data = data.replace(code, bytes([char]))
    return data.translate(None, b" \t\r\n")


def _check_bytes(count: int) -> None:
    if count > MOST_BYTES:
        seen, allowed = f"{count:,} bytes or more", f"at most {MOST_BYTES:,} bytes"
        raise RequestError("the picture's file is too large", seen=seen, allowed=allowed, fix="scale it down")
