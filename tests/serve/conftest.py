"""One engine of the pocket model, one server of it, and the same engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM, build
from tests.conftest import DATA
from tests.serve.client import ROOT, Server, started
from tests.serve.published import Published, Schema, Unpublished
from tests.serve.recordings import EARS, write_whisper

NAME = "pocket"
TOOLS = "pocket-tools"
MAX_SEQ_LEN = 512
HEARD = 48  # of the model that hears


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
def tool_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proven engine whose chat template takes tools and thinking, which its model has never seen."""
    folder = tmp_path_factory.mktemp("serve") / TOOLS
    template = str(Path(__file__).with_name("tools.jinja"))
    limits: Any = {"max_batch_size": 8, "max_seq_len": MAX_SEQ_LEN, "chat_template": template}
    return build(ROOT / "models" / "pocket-chat", folder, device="cpu", **limits)


@pytest.fixture(scope="session")
def tool_server(tool_engine: Path) -> Iterator[Server]:
    """A server of it, which every test leaves idle."""
    with started(tool_engine) as found:
        yield found


@pytest.fixture(scope="session")
def published() -> Schema:
    path = DATA / "text" / "openai-openapi.yaml"
    return Published(path) if path.exists() else Unpublished()


@pytest.fixture(scope="session")
def llm(engine: Path) -> LLM:
    """The engine without a server."""
    return LLM(engine, "cpu")


def chat(text: str = "What is 12 + 30?", **values: Any) -> dict[str, Any]:
    """A body of ``/v1/chat/completions``."""
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **values}


def completion(prompt: object = "A fire broke out in a", **values: Any) -> dict[str, Any]:
    """A body of ``/v1/completions``."""
    return {"model": NAME, "prompt": prompt, **values}


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a speech model."""
    return write_whisper(tmp_path_factory.mktemp("serve") / EARS)


@pytest.fixture(scope="session")
def speech_server(whisper: Path) -> Iterator[Server]:
    """A server of it whose windows have few tokens; every test leaves it idle."""
    with started(whisper, "--unproven", "--max-seq-len", HEARD, "--max-batch-size", 8) as found:
        yield found
