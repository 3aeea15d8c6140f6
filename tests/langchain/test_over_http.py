"""``ChatOpenAI`` against the server: LangChain's own suite, streams, usage."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from openai import DefaultAsyncHttpxClient

from ingot import build
from tests.langchain.conftest import POCKET
from tests.serve.client import Server, started

openai = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "langchain_docs.py"
SUM = "What is 12 + 30?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("http") / "pocket"
    build(POCKET, folder, device="cpu", max_batch_size=32, max_seq_len=2048)
    with started(folder) as found:
        yield found


def values(server: Server) -> dict[str, Any]:
    return {
        "model": "pocket",
        "base_url": f"http://127.0.0.1:{server.port}/v1",
        "api_key": "none",
        "stream_usage": True,
    }


class TestChatOpenAI(ChatModelIntegrationTests):
    """What the pocket model can do; the server's tools are tested where a model can call them."""

    _server: Server

    @pytest.fixture(autouse=True)
    def _opened(self, server: Server) -> None:
        self._server = server

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # One for each test: ChatOpenAI would keep connections for the next test's event loop.
        return {**values(self._server), "http_async_client": DefaultAsyncHttpxClient()}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 100, "stop": []}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return False

    @pytest.mark.xfail(reason="ChatML takes one system message, and the server joins none", strict=True)
    def test_double_messages_conversation(self, model: BaseChatModel) -> None:
        super().test_double_messages_conversation(model)


def test_a_stream_and_its_usage_are_those_of_the_whole(server: Server) -> None:
    chat = openai.ChatOpenAI(**values(server), temperature=0)
    whole, chunks = chat.invoke(SUM), list(chat.stream(SUM))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.text == whole.text == "12 + 30 = 42."
    assert joined.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert whole.response_metadata["finish_reason"] == "stop"


def test_the_example_asks_a_server(server: Server, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["langchain_docs.py", "--url", f"http://127.0.0.1:{server.port}", "--model", "pocket"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("\n> ") == 3
    assert "[docs/terminal.md: Exit codes of the terminal]" in out


def test_values_reach_the_server(server: Server) -> None:
    chat = openai.ChatOpenAI(**values(server), temperature=0, logprobs=True, top_logprobs=2, stop=["="])
    message = chat.invoke(SUM)
    assert message.text == "12 + 30 "
    assert len(message.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
