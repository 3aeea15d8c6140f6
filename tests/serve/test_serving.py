"""The server's life cycle without engines: address, limits, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.config.server_config import ServeConfig
from ingot.serve import server
from ingot.serve.api_errors import ApiError
from ingot.serve.app import _SPARE, ServerState, make_app
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.http.http_bodies import Guard
from ingot.version import VERSION


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.grid(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_printed_address_answers_and_a_signal_ends_it(
    monkeypatch: pytest.MonkeyPatch, host: str, shown: str, number: signal.Signals
) -> None:
    for name in ("limit_log", "leave_out_what_is_loaded"):  # of a whole process, which tests share
        monkeypatch.setattr(server, name, lambda: None)
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 here")
    urls: list[str] = []
    answers: list[Any] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{urls[0]}/version", timeout=10) as reply:
                answers.append(json.load(reply))
        finally:
            os.kill(os.getpid(), number)

    async def main() -> bool:
        loop = asyncio.get_running_loop()

        def ready(url: str) -> None:
            urls.append(url)
            loop.run_in_executor(None, ask)

        async with asyncio.timeout(20):
            return await server.serve([], {}, ServeConfig(host=host, port=0), on_ready=ready)

    assert asyncio.run(main()) == (number == signal.SIGINT)
    assert urls[0].rpartition(":")[0] == f"http://{shown}"
    assert answers == [{"version": VERSION}]


@pytest.mark.parametrize("rooms", [[], [5], [5, 7, 7]])
def test_requests_of_all_models_have_room(rooms: list[int]) -> None:
    models: Any = {
        str(i): SimpleNamespace(engine=SimpleNamespace(most_answers=most)) for i, most in enumerate(rooms)
    }
    app = make_app(ServerState(models, ServeConfig(), Metrics()), None)
    (guard,) = (one for one in app.user_middleware if one.cls is Guard)  # type: ignore[comparison-overlap]
    assert guard.kwargs["most_open"] == _SPARE + sum(rooms)


def test_a_request_without_a_model() -> None:
    models: Any = {"qwen": "first", "pocket": "second"}
    several = ServerState(models, ServeConfig(), Metrics())
    with pytest.raises(ApiError, match=r"^model is missing; this server has qwen, pocket$") as caught:
        several.find(None)
    assert (caught.value.status, caught.value.param) == (400, "model")
    with pytest.raises(ApiError, match="no such model: ''; this server has qwen, pocket") as caught:
        several.find("")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert several.find("pocket") == models["pocket"]
    only: Any = {"qwen": "first"}
    assert ServerState(only, ServeConfig(), Metrics()).find(None) == only["qwen"]
