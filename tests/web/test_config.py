"""Which addresses the page takes, and what its verbs say of flags that do not fit."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from ingot.adapters.web.page_process import _Policy
from ingot.cli.main import app
from ingot.config.server_config import WebConfig
from ingot.errors import ConfigError
from tests.serve.client import ROOT

POCKET = str(ROOT / "models" / "pocket-chat")


@pytest.mark.parametrize("url", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_the_url_may_end_in_v1(url: str) -> None:
    assert WebConfig(url).base == "http://h:8000"


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:x", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        WebConfig(url)


def test_it_goes_through_json() -> None:
    config = WebConfig("http://h", server_name="0.0.0.0", web_port=1, share=True)
    assert WebConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("words", "served"),
    [
        (["serve", POCKET, "--web-port", "7000"], "flags of the page need --web"),
        (["web", "--url", "nowhere"], "the URL of a server is needed"),
        (["web", "--api-key", "ключ"], "the key must be printable ASCII"),
    ],
)
def test_misuse_is_reported(words: list[str], served: str) -> None:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2
    assert served in " ".join(found.stderr.split())


@pytest.mark.parametrize("is_installed", [True, False])
def test_what_keeps_a_page_from_starting_is_reported_before_an_engine_loads(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = object() if is_installed else None
    monkeypatch.setattr("ingot.adapters.web.page_process.importlib.util.find_spec", lambda name: spec)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = CliRunner().invoke(app, ["serve", POCKET, "--web", "--web-port", port])
    served = "the page cannot listen" if is_installed else "pip install -c constraints.txt '.[web]'"
    assert found.exit_code == (2 if is_installed else 1)
    assert served in " ".join(found.stderr.split())


async def test_nothing_of_an_answer_may_be_sent_or_loaded_elsewhere() -> None:
    sent: list[Any] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    await _Policy(page)({}, None, send)
    policy = dict(sent[0]["headers"])[b"content-security-policy"].decode()
    rules = dict(one.strip().split(" ", 1) for one in policy.split(";"))
    for rule in ("form-action", "base-uri"):  # default-src stands for neither
        assert rules[rule] == "'self'"
    assert "http" not in rules["default-src"]
