"""One engine of the pocket model, one server of it, and the same engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM, build
from tests.conftest import DATA
from tests.serve.client import ROOT, Server, started
from tests.serve.published import Published

NAME = "pocket"
MAX_SEQ_LEN = 512


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proven engine, which no test changes."""
    folder = tmp_path_factory.mktemp("serve") / NAME
    return build(
        ROOT / "models" / "pocket-chat", folder, device="cpu", max_batch_size=32, max_seq_len=MAX_SEQ_LEN
    )


@pytest.fixture(scope="session")
def server(engine: Path) -> Iterator[Server]:
    """A server of it, which every test leaves idle."""
    with started(engine) as found:
        yield found


@pytest.fixture(scope="session")
def llm(engine: Path) -> LLM:
    """The engine without a server."""
    return LLM(engine, "cpu")


class Unpublished:
    """In place of the schema where it is not: the other checks of a test hold all the same."""

    def check(self, name: str, value: object) -> None:
        """Nothing is known of it."""


Schema = Published | Unpublished


@pytest.fixture(scope="session")
def published() -> Schema:
    path = DATA / "text" / "openai-openapi.yaml"
    return Published(path) if path.exists() else Unpublished()


def chat(text: str = "What is 12 + 30?", **values: Any) -> dict[str, Any]:
    """A body of ``/v1/chat/completions``."""
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **values}


def completion(prompt: object = "A fire broke out in a", **values: Any) -> dict[str, Any]:
    """A body of ``/v1/completions``."""
    return {"model": NAME, "prompt": prompt, **values}
