"""Files that ask FFmpeg for more than their own bytes, or that are much larger than they look."""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from ingot.audio import audio_file
from ingot.audio.audio_worker import limits, question, samples_of
from ingot.audio.recording_samples import read_samples
from ingot.errors import RequestError
from ingot.sandbox.limited_process import LimitedProcess
from tests.audio_files import media, wav

SECRET = wav((np.sin(np.arange(32_000) / 5) * 20_000).astype("<i2").tobytes())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that FFmpeg wants to open."""
    found: list[str] = []

    def note(url: str, flags: int, options: object) -> Any:
        found.append(url)
        raise PermissionError

    monkeypatch.setattr(audio_file, "_refuse", note)
    return found


@pytest.fixture
def site() -> Iterator[tuple[str, list[str]]]:
    """The address of a recording, and what was asked of it."""
    seen: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(SECRET)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/secret.wav", seen
        server.shutdown()
        thread.join()


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{}\n#EXT-X-ENDLIST\n",
    "hls as mp4": '#EXTM3U\n#EXT-X-MAP:URI="{}"\n#EXTINF:10,\n{}\n',
    "concat": "ffconcat version 1.0\nfile '{}'\n",
    "concat by any name": "ffconcat version 1.0\nfile 'subfile,,start,0,end,0,,:{}'\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period>'
    '<AdaptationSet mimeType="audio/wav"><Representation id="1"><BaseURL>{}</BaseURL></Representation>'
    "</AdaptationSet></Period></MPD>",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=-\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\na={}\n",
    "smil": "<smil><body><audio src='{}'/></body></smil>",
    "m3u": "{}\n",
    "pls": "[playlist]\nFile1={}\n",
}


@pytest.mark.parametrize("kind", PLAYLISTS)
@pytest.mark.parametrize("place", ["file", "http"])
def test_a_playlist_opens_nothing(
    kind: str, place: str, asked: list[str], site: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, seen = site
    secret = tmp_path / "secret.wav"
    secret.write_bytes(SECRET)
    for name in {"file": (str(secret), f"file://{secret}"), "http": (address,)}[place]:
        text = PLAYLISTS[kind].replace("{}", name).encode()
        for source in (text, tmp_path / f"list.{kind[:4]}"):
            if isinstance(source, Path):
                source.write_bytes(text)
            with pytest.raises(RequestError, match="no audio that can be read"):
                read_samples(source)
    assert (asked, seen) == ([], [])


@pytest.mark.parametrize("kind", ["hls", "concat"])
def test_nothing_is_opened_even_by_a_container_that_may(
    kind: str, site: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line of defence: what FFmpeg wants to open is refused."""
    address, seen = site
    (tmp_path / "secret.wav").write_bytes(SECRET)
    monkeypatch.setattr(audio_file, "_CONTAINERS", f"{audio_file._CONTAINERS},{kind}")
    for name in (address, str(tmp_path / "secret.wav")):
        with pytest.raises(RequestError, match="no audio that can be read"):
            read_samples(PLAYLISTS[kind].replace("{}", name).encode())
    assert seen == []


def box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + kind + body


def test_a_movie_whose_samples_are_in_another_file(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QuickTime's data references: an absolute path, and one beside the movie."""
    (tmp_path / "secret.wav").write_bytes(SECRET)
    monkeypatch.chdir(tmp_path)
    whole = media(np.zeros(32_000), "mov", "pcm_s16le")
    at = whole.index(b"dref") - 4
    size = int.from_bytes(whole[at : at + 4], "big")
    name = str(tmp_path / "secret.wav").encode()
    alias = bytearray(150)
    struct.pack_into(">HH", alias, 4, 150 + 4 + len(name), 2)
    path = struct.pack(">HH", 18, len(name)) + name + b"\xff\xff\0\0"
    for reference in (
        box(b"alis", bytes(4), bytes(alias), path),
        box(b"url ", bytes(4), b"file://" + name + b"\0"),
        box(b"url ", bytes(4), b"secret.wav\0"),
    ):
        dref = box(b"dref", bytes(4), struct.pack(">I", 1), reference)
        grown, moved = len(dref) - size, bytearray(whole[:at] + dref + whole[at + size :])
        for parent in (b"moov", b"trak", b"mdia", b"minf", b"dinf"):
            where = bytes(moved).index(parent) - 4
            length = int.from_bytes(moved[where : where + 4], "big") + grown
            moved[where : where + 4] = length.to_bytes(4, "big")
        found = read_samples(bytes(moved))
        assert np.abs(found).max() == 0, "the movie's own samples"
    assert asked == []


@pytest.fixture(scope="module")
def process() -> Iterator[LimitedProcess]:
    with LimitedProcess("ingot.audio.audio_worker", limits(60.0)) as found:
        yield found


def element(name: str, *parts: bytes) -> bytes:
    """Of Matroska, with its size in eight bytes."""
    body = b"".join(parts)
    return bytes.fromhex(name) + b"\1" + len(body).to_bytes(7, "big") + body


@pytest.mark.parametrize("tracks", [90, 60_000])
def test_thousands_of_tracks(process: LimitedProcess, tracks: int) -> None:
    """The first is read; those after the hundredth are not even examined."""
    sound = element(
        "e1", element("b5", struct.pack(">f", 16000.0)), element("9f", b"\1"), element("6264", b"\x10")
    )
    entries = [
        element("ae", element("d7", n.to_bytes(3, "big")), element("73c5", n.to_bytes(3, "big")),
                element("83", b"\2"), element("86", b"A_PCM/INT/LIT"), sound)
        for n in range(1, tracks + 1)
    ]  # fmt: skip
    block = element("a3", b"\x81\0\0\x80", bytes(32_000))
    head = element("1a45dfa3", element("4282", b"matroska"))
    data = head + element(
        "18538067", element("1654ae6b", *entries), element("1f43b675", element("e7", b"\0"), block)
    )
    assert len(samples_of(process.ask_bytes(question(data, 60.0)))) == 16_000
    with av.open(io.BytesIO(data), "r") as file:
        assert len(file.streams) > 80, "a file with as many tracks"


def test_a_codec_that_is_not_read() -> None:
    with pytest.raises(RequestError, match=r"audio of this codec is not read.*tta.*PCM, FLAC, MP3"):
        read_samples(media(np.zeros(16000), "matroska", "tta"))


BOMBS = {
    "flac": ("flac", "flac", 1),
    "webm": ("webm", "libopus", 1),
    "ogg": ("ogg", "libopus", 2),
    "mp3": ("mp3", "mp3", 2),
    "aac": ("adts", "aac", 2),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_silences_of_no_known_length(process: LimitedProcess, kind: str) -> None:
    """What no header says is counted as it is decoded, in the server's process, which goes on."""
    container, codec, times = BOMBS[kind]
    seconds = 70 // times
    data = times * media(np.zeros(16000 * seconds), container, codec, piped=True)
    with pytest.raises(RequestError, match=r"too long.*at most 60 s"):
        samples_of(process.ask_bytes(question(data, 60.0)))
    assert len(samples_of(process.ask_bytes(question(SECRET, 60.0)))) == 32_000
