"""A server of the pocket model with a long context, for clients in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ingot import build
from tests.serve.client import ROOT, Server, started


@pytest.fixture(scope="session")
def pocket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients") / "pocket"
    build(ROOT / "models" / "pocket-chat", folder, device="cpu", max_batch_size=32, max_seq_len=2048)
    with started(folder) as found:
        yield found


@pytest.fixture(scope="session")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of an engine whose chat template takes tools. Its model has never seen any: grammars make it call."""
    folder = tmp_path_factory.mktemp("clients") / "pocket-tools"
    template = str(ROOT / "tests" / "serve" / "tools.jinja")
    limits: Any = {"max_batch_size": 16, "max_seq_len": 2048, "chat_template": template}
    build(ROOT / "models" / "pocket-chat", folder, device="cpu", **limits)
    with started(folder, "--closed-objects") as found:
        yield found


@pytest.fixture
def url(pocket_server: Server) -> str:
    return f"http://127.0.0.1:{pocket_server.port}"
