"""A server in its own processes, and a client of the standard library that shows every byte.

with started(engine, "--max-queue", 1) as server:
    server.post("/v1/completions", {"model": "m", "prompt": "Hi"}).json
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds; only a failing test waits this long
JSON = {"Content-Type": "application/json"}


@dataclass
class Reply:
    """A complete answer."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        """The error's four fields."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class Stream:
    """Events of one answer as they come."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self.status = response.status

    def __iter__(self) -> Iterator[Any]:
        """Values of ``data:`` lines; the text ``[DONE]`` as it is; ``event:`` lines name the types."""
        named = None
        for line in self._response:
            if line.startswith(b"event: "):
                named = line.removeprefix(b"event: ").strip().decode()
            elif line.strip():
                assert line.startswith(b"data: "), line
                text = line.removeprefix(b"data: ").strip()
                value: Any = "[DONE]" if text == b"[DONE]" else json.loads(text)
                assert named is None or value["type"] == named
                yield value

    def close(self) -> None:
        """Leave."""
        self._connection.sock and self._connection.sock.close()
        self._response.close()
        self._connection.close()


class Server:
    """A server that has started."""

    def __init__(self, process: subprocess.Popen[str], port: int, lines: list[str]) -> None:
        self.process = process
        self.port = port
        self.lines = lines
        self.headers: dict[str, str] = {}

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request on a connection of its own; ``body``: bytes as they are, anything else as JSON."""
        connection, response = self._sent(method, path, body, headers)
        try:
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.request("GET", path)

    def post(self, path: str, body: object) -> Reply:
        return self.request("POST", path, body)

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """Ask for a stream; what is before its first event is read."""
        return Stream(*self._sent("POST", path, {**body, "stream": True}, None))

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream but ``[DONE]``, which is the last."""
        *events, last = self.stream(path, body)
        assert last == "[DONE]"
        return events

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, all its labels but ``labels`` summed up."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        rows = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", self.get("/metrics").data.decode(), re.M)
        assert rows, name
        return sum(float(value) for found, value in rows if all(one in found for one in wanted))

    def idle(self) -> bool:
        """Whether the engines have nothing to do."""
        return self.metric("ingot_num_requests_running") + self.metric("ingot_num_requests_waiting") == 0

    def engine_pids(self) -> list[int]:
        """Processes that the server started and that run an engine."""
        return self.child_pids(b"engine_process")

    def child_pids(self, words: bytes) -> list[int]:
        """Processes that the server started and whose command line, or name where it is a fork, holds these
        words.
        """
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and (folder / "stat").exists():
                try:
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    line = (folder / "cmdline").read_bytes() + (folder / "comm").read_bytes()
                except OSError:
                    continue
                if parent == self.process.pid and words in line:
                    found.append(int(folder.name))
        return sorted(found)

    def _sent(
        self, method: str, path: str, body: object, headers: dict[str, str] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(method, path, data, {**JSON, **self.headers} if headers is None else headers)
        return connection, connection.getresponse()


def launch(*words: object, faults: Path | None = None) -> tuple[subprocess.Popen[str], list[str]]:
    """Start ``ingot serve``; the lines that it writes to stderr are collected as they come. ``faults``: a
    folder whose sitecustomize.py the server's processes run first.
    """
    path = os.pathsep.join(map(str, [*([faults] if faults else []), ROOT]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for name in ("INGOT_API_KEY", "INGOT_MODEL_NAME"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "ingot", "serve", *map(str, words), "--device", "cpu", "--threads", "1"],
        env=environment,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []

    def collect() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)

    threading.Thread(target=collect, daemon=True).start()
    return process, lines


class Gate:
    """Lets engine processes start, or makes them wait; its folder is for ``launch``.

    Args:
        more: code that each engine's process runs behind the gate.
    """

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder, self._closed = folder, folder / "closed"
        code = f"""
import sys, time
from pathlib import Path

if "engine_process" in " ".join(sys.orig_argv):
    while Path({str(self._closed)!r}).exists():
        time.sleep(0.02)
    {more}
"""
        (folder / "sitecustomize.py").write_text(code, encoding="utf-8")

    def close(self) -> None:
        self._closed.touch()

    def open(self) -> None:
        self._closed.unlink()


@contextmanager
def started(*words: object, faults: Path | None = None) -> Iterator[Server]:
    """A server on a free port, until the block ends."""
    process, lines = launch(*words, "--port", 0, faults=faults)
    try:
        wait_for("the server to start", lambda: process.poll() is not None or _port(lines) is not None)
        port = _port(lines)
        assert port is not None, "".join(lines)
        yield Server(process, port, lines)
    finally:
        engines = Server(process, 0, lines).engine_pids()
        process.kill()
        process.wait()
        wait_for("the engines to follow their server", lambda: all(map(is_gone, engines)))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, zombies included."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def memory(pid: int, *, peak: bool = False) -> int:
    """Bytes that a process has in memory, or the most that it ever had."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) << 10


def wait_for(what: str, condition: Any) -> None:
    """Until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"still waiting for {what}"
        time.sleep(0.02)


def _port(lines: list[str]) -> int | None:
    found = re.search(r"^serving .* on http://127\.0\.0\.1:(\d+)$", "".join(lines), re.M)
    return int(found[1]) if found else None
