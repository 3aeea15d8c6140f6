"""IngotEmbeddings gives ``LLM.embed`` as unit vectors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from langchain_core.vectorstores import InMemoryVectorStore

from ingot import LLM
from ingot.errors import RequestError
from ingot.langchain import ChatIngot, IngotEmbeddings
from tests.e2e.tiny import write_tiny

TEXTS = ["A fire broke out in a warehouse.", "The fox ran.", "12 + 30 = 42."]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_of_unit_length_in_the_texts_order(pocket: LLM, pooling: str) -> None:
    found = torch.tensor(IngotEmbeddings(pocket, pooling=pooling).embed_documents(TEXTS))
    pooled = pocket.embed(TEXTS, pooling)
    torch.testing.assert_close(found, pooled / pooled.norm(dim=1, keepdim=True))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3))


def test_a_query_is_a_document(pocket: LLM) -> None:
    embeddings = IngotEmbeddings(pocket)
    query = torch.tensor(embeddings.embed_query(TEXTS[1]))
    torch.testing.assert_close(
        query, torch.tensor(embeddings.embed_documents(TEXTS)[1]), rtol=1e-4, atol=1e-5
    )
    assert asyncio.run(embeddings.aembed_documents([])) == []


def test_a_store_finds_the_text_itself(pocket: LLM) -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, IngotEmbeddings(pocket))
    assert [store.similarity_search(text, k=1)[0].page_content for text in TEXTS] == TEXTS


def test_what_cannot_be_embedded_is_refused(pocket: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 2: the text is empty"):
        IngotEmbeddings(pocket).embed_documents(["a", ""])
    with pytest.raises(RequestError, match="unknown pooling"):
        IngotEmbeddings(pocket, pooling="max").embed_query("a")


def test_it_opens_a_folder(tmp_path: Path) -> None:
    embeddings = IngotEmbeddings(write_tiny(tmp_path / "tiny"))
    assert len(embeddings.embed_query("Hi")) == 32
    assert ChatIngot(model=embeddings.llm, max_tokens=1).invoke("Hi").usage_metadata is not None


def python(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return ran.stdout + ran.stderr


@pytest.mark.slow
def test_ingot_needs_no_langchain() -> None:
    code = (
        "import sys, ingot.llm, ingot.cli.main; print([m for m in sys.modules if m.startswith('langchain')])"
    )
    assert python(code).strip() == "[]"


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['langchain_core'] = None; import ingot.adapters.langchain"
    assert "pip install -c constraints.txt '.[langchain]'" in python(code).splitlines()[-1]
