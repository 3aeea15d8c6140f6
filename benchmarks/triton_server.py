"""Triton Inference Server's binary from an environment with ``nvidia-pytriton`` (docs/triton.md).

with started(environment, repository, folder) as server:
    server.ask({"model": "pocket-chat", "requests": [{"text_input": "A fire"}]})
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLIENT = Path(__file__).with_name("triton_client.py")
_PATIENCE = 120.0  # seconds


class TritonServer:
    """A server that is ready."""

    def __init__(
        self, process: subprocess.Popen[bytes], environment: Path, ports: list[int], log: Path
    ) -> None:
        self.process = process
        self.environment = environment
        self.grpc, self.http, self.metrics = ports
        self.log = log

    def ask(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
        """What ``triton_client.py`` reports of requests over gRPC."""
        return json.loads(self.run(str(CLIENT), json.dumps({"url": f"127.0.0.1:{self.grpc}", **spec})))

    def run(self, *words: str) -> str:
        """What the environment's Python prints, given these words."""
        command = [str(self.environment / "bin" / "python"), *words]
        return subprocess.run(
            command, check=True, timeout=_PATIENCE, capture_output=True, text=True, cwd=ROOT
        ).stdout

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of an answer over HTTP."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def is_ready(self) -> bool:
        """Whether all models take requests."""
        url = f"http://127.0.0.1:{self.http}/v2/health/ready"
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
        return False


@contextmanager
def started(environment: Path, repository: Path, folder: Path) -> Iterator[TritonServer]:
    """A server of a repository, until the block ends; ``folder`` is for its log and its backend."""
    process, server = launch(environment, repository, folder)
    try:
        end = time.monotonic() + _PATIENCE
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start:\n{server.log.read_text()[:3000]}")
            time.sleep(0.1)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


def launch(environment: Path, repository: Path, folder: Path) -> tuple[subprocess.Popen[bytes], TritonServer]:
    """Start the binary on free ports of 127.0.0.1, with the backend's stub for the environment's Python."""
    (site,) = environment.glob("lib/python3.*/site-packages")
    binaries = site / "pytriton" / "tritonserver"
    backends = shutil.copytree(binaries / "backends", folder / "backends", dirs_exist_ok=True)
    stub = binaries / "python_backend_stubs" / site.parent.name.removeprefix("python")
    shutil.copy(stub / "triton_python_backend_stub", backends / "python")
    words = [binaries / "bin" / "tritonserver", f"--model-repository={repository}"]
    words += [f"--backend-directory={backends}", f"--cache-directory={binaries / 'caches'}"]
    ports = _free_ports(3)
    for name, port in zip(("grpc", "http", "metrics"), ports, strict=True):
        words += [f"--{name}-port={port}", f"--{name}-address=127.0.0.1"]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(word) for word in words], env=_environ(environment, site), stdout=out, stderr=out
        )
    return process, TritonServer(process, environment, ports, log)


def _environ(environment: Path, site: Path) -> dict[str, str]:
    """Where the stub finds Python (PATH), its library (LD_LIBRARY_PATH) and Ingot (PYTHONPATH)."""
    code = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    command = [environment / "bin" / "python", "-c", code]
    library = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return {
        **os.environ,
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{site / 'nvidia_pytriton.libs'}:{library}",
        "PYTHONPATH": str(ROOT),
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
