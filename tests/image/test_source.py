"""What a picture's file may be given as, and what is refused by name."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import RequestError
from ingot.image import image_source as module
from ingot.image.image_source import file_bytes

FILE = bytes(range(256)) * 3
CODED = base64.b64encode(FILE).decode()


def test_every_kind_of_source(tmp_path: Path) -> None:
    path = tmp_path / "data:x"
    path.write_bytes(FILE)
    assert file_bytes(path) == (str(path), FILE)
    assert file_bytes(str(path)) == (str(path), FILE)
    for kind in (bytes, bytearray, memoryview):
        assert file_bytes(kind(FILE)) == ("the bytes", FILE)
    assert file_bytes(memoryview(FILE)[::2])[1] == FILE[::2]
    assert file_bytes(io.BytesIO(FILE)) == ("the file", FILE)
    with path.open("rb", buffering=0) as stream:
        stream.seek(10)
        assert file_bytes(stream) == ("the file", FILE[10:])


class Little(io.BytesIO):
    """As a pipe whose writer is slow."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(100)


def test_a_stream_that_gives_little_at_a_time_is_read_to_its_end() -> None:
    assert file_bytes(Little(FILE))[1] == FILE


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{CODED}",
        f"DATA:image/png;charset=utf-8;Base64,{CODED}",
        f"data:;base64,{CODED.rstrip('=')}",
        f"data:text/plain;base64,{CODED[:100]}\r\n {CODED[100:]}\n",
        "data:image/png;base64," + CODED.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    ],
)
def test_data_urls(url: str) -> None:
    assert file_bytes(url) == ("the data URL", FILE)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "data:image/svg+xml,<svg/>",
            r"data URL is not in base64; seen: data:image/svg\+xml,; to fix: data:",
        ),
        ("data:image/png;base64,@@@@", "data URL is not in base64"),
        ("data:image/png;base64,abcde", "data URL is not in base64"),
        ("data:image/png;base64,ä", "data URL is not in base64"),
        (
            "https://example.org/cat.png",
            "not fetched.*seen: https://example.org/cat.png.*a data URL.*to fix: read",
        ),
        ("HTTP://example.org/cat.png", "not fetched"),
        ("no-such.png", "there is no such picture; seen: no-such.png; to fix: another path"),
        ("x" * 5000, r"cannot be read \(File name too long\)"),
        ("no\0such.png", r"no path \(embedded null byte\); seen: 'no\\x00such.png'"),
        (3, "this is no picture; seen: int; allowed: a path"),
        (None, "this is no picture; seen: NoneType"),
        ([b"x"], "this is no picture; seen: list"),
        (io.StringIO("x"), 'this is no picture; seen: StringIO of text.*"rb"'),
    ],
)
def test_refusals(source: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        file_bytes(source)


def test_a_folder_and_a_closed_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"this is a folder.*to fix: a file in it"):
        file_bytes(tmp_path)
    path = tmp_path / "x"
    path.write_bytes(FILE)
    with pytest.raises(RequestError, match="there is no such picture"):
        file_bytes(path / "below")
    stream = path.open("rb")
    stream.close()
    with pytest.raises(RequestError, match=r"file cannot be read .*closed"):
        file_bytes(stream)


def test_the_most_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device without an end no more is read, and of a data URL nothing decoded."""
    (tmp_path / "x").write_bytes(FILE)
    sources = [tmp_path / "x", FILE, io.BytesIO(FILE), f"data:;base64,{CODED}"]
    monkeypatch.setattr(module, "MOST_BYTES", len(FILE))
    assert [file_bytes(source)[1] for source in sources] == [FILE] * 4
    monkeypatch.setattr(module, "MOST_BYTES", len(FILE) - 1)
    for source in (*sources[:2], io.BytesIO(FILE), sources[3], "/dev/zero"):
        with pytest.raises(RequestError, match=r"too large; seen: 768 bytes.*allowed: at most 767 bytes"):
            file_bytes(source)
