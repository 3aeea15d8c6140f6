"""LangChain's own suites for chat models and embeddings, on the pocket model; nothing goes to the network."""

from __future__ import annotations

import socket
from typing import Any, NoReturn

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests

from ingot import LLM
from ingot.langchain import ChatIngot, IngotEmbeddings


class OnPocket:
    """What the engine has, and what does not apply: a model in this process needs no key or retries."""

    _llm: LLM

    @pytest.fixture(autouse=True)
    def _opened(self, pocket: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> NoReturn:
            raise AssertionError("a connection to the network")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        self._llm = pocket

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatIngot

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self._llm, "model_name": "pocket-chat"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 100, "stop": []}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_tool_choice(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return IngotEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": self._llm}


class TestChatUnit(OnPocket, ChatModelUnitTests):
    pass


class TestChatIntegration(OnPocket, ChatModelIntegrationTests):
    @property
    def enable_vcr_tests(self) -> bool:
        """There is no traffic to record: the story of ``test_stream_time`` is told by the engine."""
        return True


class TestEmbeddingsUnit(OnPocket, EmbeddingsUnitTests):
    pass


class TestEmbeddingsIntegration(OnPocket, EmbeddingsIntegrationTests):
    pass
