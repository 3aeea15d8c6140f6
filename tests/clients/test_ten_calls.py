"""Ten calls each by six clients as they come, of a model whose template takes tools.

The calls and what must come back are in ``ten/``, one script for each client; its environment runs it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.environments import run, run_node
from tests.serve.client import Server, wait_for

pytestmark = pytest.mark.slow
TEN = Path(__file__).parent / "ten"
INSTALL = {
    "openai": "openai",
    "litellm": "litellm",
    "agents": "openai-agents",
    "pydantic": "'pydantic-ai-slim[openai]'",
    "langchain": "langchain langchain-openai",
    "node": "openai zod",
}


@pytest.mark.parametrize("name", INSTALL)
def test_ten_calls(name: str, tools_server: Server, tmp_path: Path) -> None:
    words = (f"http://127.0.0.1:{tools_server.port}", "pocket-tools")
    if name == "node":
        out = run_node(TEN / "with_node.mjs", *words, install=INSTALL[name], cwd=tmp_path)
    else:
        out = run(name, INSTALL[name], "python", TEN / f"with_{name}.py", *words, cwd=tmp_path)
    found = json.loads(out.splitlines()[-1])
    assert len(found) == 10
    assert {call: result for call, result in found.items() if result != "ok"} == {}
    wait_for("the server to be idle", tools_server.idle)
