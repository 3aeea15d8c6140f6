"""``/openapi.json`` says what the server takes, and no request made of it ends in a 5xx."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ingot.config.server_config import ServeConfig
from ingot.serve.app import ServerState, make_app
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.openapi_page import document
from tests.serve.client import Server, started
from tests.serve.conftest import chat, completion
from tests.serve.test_refusals import BAD_CHATS, BAD_COMPLETIONS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What a schema does not say: ranges of sampling values, and what depends on other values or on the engine.
UNSAID = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "top_logprobs", "max_tokens", "messages", "messages[0].role", "messages[0].content",
    "prompt", "best_of", "suffix", "chat_template_kwargs", "n", "tool_choice", "logit_bias",
)  # fmt: skip


def validator(path: str) -> jsonschema.Draft202012Validator:
    found = document()
    body = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**body, "components": found["components"]})


def test_it_describes_every_route() -> None:
    app = make_app(ServerState({}, ServeConfig(), Metrics()), None)
    routes = {
        (route.path.replace(":path", ""), method.lower())  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    paths = document()["paths"]
    assert routes == {(path, method) for path, found in paths.items() for method in found}


def test_it_is_served(server: Server) -> None:
    assert server.get("/openapi.json").json == document()


@pytest.mark.parametrize(
    ("path", "values", "field"),
    [(CHAT, *one) for one in BAD_CHATS] + [(COMPLETIONS, *one) for one in BAD_COMPLETIONS],
    ids=lambda value: str(value)[:40],
)
def test_it_lists_refused_fields(path: str, values: dict[str, Any], field: str) -> None:
    """Bodies that the server refuses are none of the document's, but for what it cannot say."""
    good = chat() if path == CHAT else completion()
    assert validator(path).is_valid(good)
    assert not validator(path).is_valid(good | values) or field in UNSAID


def test_it_accepts_neutral_values() -> None:
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": None}
    assert validator(CHAT).is_valid(chat() | nothing | {"user": "me"})
    ids = {"model": "m", "input": [[1, 2], [3]]}
    assert validator("/v1/embeddings").is_valid(ids)
    assert not validator("/v1/embeddings").is_valid(ids | {"pooling": "max"})
    assert not validator("/chat").is_valid({"prompt": "Hi", "history": [["a", "b", "c"]]})


@pytest.fixture
def short(engine: Path) -> Iterator[Server]:
    """A server whose answers are short, so that examples take no time."""
    with started(engine, "--max-seq-len", 48, "--max-batch-size", 4, "--max-queue", 4) as found:
        yield found


@pytest.mark.slow
def test_no_request_of_it_ends_in_a_5xx(short: Server, tmp_path: Path) -> None:
    """Schemathesis makes good and bad requests of the document."""
    beside = Path(sys.executable).with_name("schemathesis")
    program = str(beside) if beside.exists() else shutil.which("schemathesis")
    if program is None:
        pytest.skip("pip install schemathesis, also into an environment of its own whose bin is on PATH")
    url = f"http://127.0.0.1:{short.port}/openapi.json"
    checks = "not_a_server_error,content_type_conformance,response_schema_conformance"
    words = [
        "run",
        url,
        "--checks",
        checks,
        "--max-examples",
        "20",
        "--seed",
        "1",
        "--phases",
        "coverage,fuzzing",
    ]
    words += ["--suppress-health-check", "all"]
    found = subprocess.run([program, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert "Traceback" not in "".join(short.lines)
