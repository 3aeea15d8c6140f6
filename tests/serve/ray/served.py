"""``serve run`` of a YAML file in its own processes. The HTTP client is ``tests/serve/client.py``.
with ray_served(config, key="sesame") as server: ...
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serve.client import ROOT, Server

START_SECONDS = 300.0  # Ray, its proxy and the replicas, on two busy cores
MARK = "INGOT_TEST_MARK"


class RayServer(Server):
    """A server behind Ray's proxy, and its processes."""

    mark: str

    def per_replica(self, name: str, **labels: str) -> dict[str, float]:
        """The value of a metric of each replica."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        rows = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", self.get("/metrics").data.decode(), re.M)
        found: dict[str, float] = {}
        for row, value in rows:
            if all(one in row for one in wanted):
                replica = row.partition('replica="')[2].partition('"')[0]
                found[replica] = found.get(replica, 0.0) + float(value)
        return found

    def pids(self, words: bytes) -> list[int]:
        """Processes of this server whose command line holds these words."""
        found = []
        for pid in self._family():
            with contextlib.suppress(OSError):
                if words in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return sorted(found)

    def end(self) -> None:
        """End it and all its processes."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        for pid in self._family():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _family(self) -> list[int]:
        """Processes that were started with this server's mark in their environment."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


@contextmanager
def ray_served(config: dict[str, Any], folder: Path, key: str | None = None) -> Iterator[RayServer]:
    """A server of this configuration (YAML) on a free port until the block ends; its replicas are ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path, mark = folder / "serve.yaml", secrets.token_hex(8)
    path.write_text(json.dumps({"http_options": {"host": "127.0.0.1", "port": port}, **config}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: mark}
    environment |= {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    environment.pop("INGOT_API_KEY", None)
    if key is not None:
        environment["INGOT_API_KEY"] = key
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.serve.scripts", "run", str(path)],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None
    threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True).start()
    server = RayServer(process, port, lines)
    server.mark = mark
    if key is not None:
        server.headers = {"Authorization": f"Bearer {key}"}
    wanted = sum(d["num_replicas"] for a in config["applications"] for d in a["deployments"])
    try:
        wait_long("the server", lambda: process.poll() is not None or replicas(server) == wanted, lines)
        assert process.poll() is None, "".join(lines)
        yield server
    finally:
        server.end()


def replicas(server: RayServer) -> int:
    """Replicas that answer; 0 where nothing does yet."""
    try:
        return len(server.per_replica("ingot_engine_alive"))
    except OSError:
        return 0


def wait_long(what: str, condition: Any, lines: list[str]) -> None:
    """Until a condition holds, or the time for a start is over."""
    end = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < end, f"still waiting for {what}: {''.join(lines[-40:])}"
        time.sleep(0.2)
