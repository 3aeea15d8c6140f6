"""Clients that a server should not let hurt others.

with Neighbour("slow", "127.0.0.1", port, "m", longest=8192, seed=0) as one, one.let_go(): ...
"""

from __future__ import annotations

import http.client
import io
import json
import multiprocessing
import random
import socket
import time
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_WORDS = [
    "fire",
    "water",
    "house",
    "garden",
    "river",
    "stone",
    "light",
    "winter",
    "summer",
    "bread",
    "table",
    "window",
    "bridge",
    "market",
    "letter",
    "station",
    "forest",
    "engine",
    "copper",
    "harbour",
    "village",
    "morning",
    "evening",
    "captain",
    "doctor",
    "teacher",
]
COMPLETIONS, CHAT, TRANSCRIBE = "/v1/completions", "/v1/chat/completions", "/v1/audio/transcriptions"
EARS = "ears"  # the speech model, beside the one of the streams
_RATE, _SECONDS = 16000, 60  # of a recording
_SPARE = 16  # tokens of the context that a long prompt leaves free
_LOOK = 65536


def post(path: str, body: dict[str, Any]) -> bytes:
    """A request, ready to be sent."""
    return _request(path, json.dumps(body).encode(), "application/json")


def upload(path: str, file: bytes, **fields: str) -> bytes:
    """A form with a file, ready to be sent."""
    line = b"--a-line-that-no-recording-has"
    parts = [b'name="%s"\r\n\r\n%s' % (name.encode(), value.encode()) for name, value in fields.items()]
    parts.append(b'name="file"; filename="noise.wav"\r\nContent-Type: audio/wav\r\n\r\n' + file)
    body = b"".join(line + b"\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
    return _request(path, body + line + b"--\r\n", f"multipart/form-data; boundary={line[2:].decode()}")


def _request(path: str, data: bytes, kind: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + f"Content-Type: {kind}\r\n\r\n".encode() + data


def tokens_of(host: str, port: int, model: str, text: str) -> tuple[int, int]:
    """How many tokens a text has, and how many the model takes."""
    connection = http.client.HTTPConnection(host, port, timeout=600)
    body = json.dumps({"model": model, "prompt": text})
    connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found["count"], found["max_model_len"]


def words(count: int, rng: random.Random) -> str:
    """A text that no earlier request had, so that no cache knows it."""
    return " ".join(rng.choices(_WORDS, k=count))


class Maker:
    """The next request of each kind; ``longest``: tokens that a prompt may have."""

    def __init__(self, model: str, longest: int, per_word: float, seed: int) -> None:
        self.model, self.longest, self.per_word = model, longest, per_word
        self.rng = random.Random(seed)

    def ordinary(self) -> bytes:
        return post(COMPLETIONS, {**self._values(64, stream=True), "prompt": words(8, self.rng)})

    def slow(self) -> bytes:
        long = {**self._values(self.longest // 2, stream=True), "prompt": words(8, self.rng)}
        return post(COMPLETIONS, long | {"logprobs": 5})

    def long(self) -> bytes:
        return self._chat([self._fill(self.longest - 2 * _SPARE)])

    def scored(self) -> bytes:
        """A long prompt whose own log-probabilities are wanted."""
        prompt = self._fill(self.longest // 4)
        return post(COMPLETIONS, {**self._values(1), "prompt": prompt, "echo": True, "logprobs": 5})

    def schema(self) -> bytes:
        """64 KB of properties."""
        fields: dict[str, Any] = {}
        while len(json.dumps(fields)) < 64000:
            name = "_".join(self.rng.choices(_WORDS, k=3)) + str(len(fields))
            fields[name] = {"type": "string", "enum": [words(2, self.rng) for _ in range(4)]}
        schema = {"type": "object", "properties": fields, "required": list(fields)[:1]}
        wanted = {"type": "json_schema", "json_schema": {"name": "wide", "schema": schema, "strict": True}}
        values = {"response_format": wanted, "ignore_eos": False, "max_tokens": 64}
        return self._chat([words(8, self.rng)], **values)

    def talk(self) -> bytes:
        """200 messages in three quarters of the context."""
        each = max(1, int((self.longest * 0.75 / 200 - 8) / self.per_word))
        return self._chat([words(each, self.rng) for _ in range(199)])

    def refused(self) -> bytes:
        """A text of 5 MB, which is longer than any context."""
        return self._chat([words(5_000_000 // 7, self.rng)[:5_000_000]])

    def pieces(self) -> bytes:
        """5 MB of small values, which are no messages."""
        value = [{"type": "text", "text": "a"}] * 160_000
        return post(CHAT, {**self._values(4), "messages": [{"role": "user", "content": value}]})

    def recording(self) -> bytes:
        """A minute of noise, which another model of the server transcribes."""
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 2, _RATE, 0, "NONE", ""))
            sound.writeframes(self.rng.randbytes(2 * _RATE * _SECONDS))
        return upload(TRANSCRIBE, file.getvalue(), model=EARS, language="en")

    def _fill(self, tokens: int) -> str:
        return words(int(tokens / self.per_word * 0.97), self.rng)

    def _chat(self, texts: list[str], **values: Any) -> bytes:
        messages = [
            {"role": ("user", "assistant")[position % 2], "content": text}
            for position, text in enumerate(texts)
        ]
        return post(CHAT, {**self._values(4), "messages": messages, **values})

    def _values(self, new_tokens: int, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": new_tokens, "ignore_eos": True, **more}


CASES = ("slow", "long", "scored", "schema", "talk", "refused", "pieces")
HEARD = ("recording",)  # where the server has a speech model, too


class Neighbour:
    """One client in a process of its own, which waits to be let go."""

    def __init__(self, kind: str, host: str, port: int, model: str, longest: int, seed: int) -> None:
        sample = words(400, random.Random(0))
        maker = Maker(model, longest, tokens_of(host, port, model, sample)[0] / 400, seed)
        make: Callable[[], bytes] = getattr(maker, kind)
        fork = multiprocessing.get_context("fork")
        self._go, self._stop, self._results = fork.Event(), fork.Event(), fork.SimpleQueue()
        target = _read_slowly if kind == "slow" else _ask_again
        self._process = fork.Process(target=self._run, args=(target, make, (host, port)))

    def __enter__(self) -> Neighbour:
        self._process.start()
        assert self._results.get() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join()

    @contextmanager
    def let_go(self) -> Iterator[float]:
        """Until the block ends; gives when it began, on ``time.perf_counter``."""
        self._go.set()
        yield time.perf_counter()
        self._stop.set()

    def statuses(self) -> tuple[dict[int, int], list[float]]:
        """Statuses of its requests, 0: it was still under way; and the seconds until each answer began, which
        of a prompt that fills the context is all but its time to first token.
        """
        statuses, seconds = self._results.get()
        return dict(statuses), seconds

    def _run(self, target: Any, make: Callable[[], bytes], address: tuple[str, int]) -> None:
        requests = [make() for _ in range(4)]
        self._results.put("ready")
        self._go.wait()
        self._results.put(target(address, requests, make, self._stop))


def _ask_again(
    address: tuple[str, int], requests: list[bytes], make: Any, stop: Any
) -> tuple[Counter[int], list[float]]:
    """Send a request and read its answer, again and again."""
    statuses: Counter[int] = Counter()
    waited: list[float] = []
    while not stop.is_set():
        status, seconds = _exchange(address, requests.pop() if requests else make(), stop)
        statuses[status] += 1
        waited += [seconds] if status else []
    return statuses, waited


def _exchange(address: tuple[str, int], request: bytes, stop: Any) -> tuple[int, float]:
    sent = came = time.perf_counter()
    with socket.create_connection(address) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # an answer came before the body's end
            connection.sendall(request)
        connection.settimeout(0.2)
        begin = b""
        while not stop.is_set():
            try:
                data = connection.recv(_LOOK)
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
            if not data:
                break
            came = came if begin else time.perf_counter()
            begin = begin or data
    return (int(begin.split(b" ", 2)[1]) if begin else 0), round(came - sent, 3)


def _read_slowly(
    address: tuple[str, int], requests: list[bytes], make: Any, stop: Any
) -> tuple[Counter[int], list[float]]:
    """One stream, one byte of it per second."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.sendall(requests.pop())
        begin = b""
        while not stop.wait(1.0):
            begin += connection.recv(1)
    return Counter({0: 1}), []
