"""The example that answers questions about the documentation finds their sources."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM
from ingot.langchain import ChatIngot, IngotEmbeddings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTIONS = [json.loads(line) for line in (EXAMPLES / "docs_questions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "langchain_docs.py"), run_name="example")


@pytest.fixture(scope="module")
def retriever(example: dict[str, Any], pocket: LLM) -> Any:
    """Over the page of the first question."""
    passages = [one for one in example["passages"]() if one.metadata["file"] == QUESTIONS[0]["file"]]
    return example["DocsRetriever"].over(passages, IngotEmbeddings(pocket))


def test_every_question_has_a_source_that_is_there(example: dict[str, Any]) -> None:
    assert len({q["question"] for q in QUESTIONS}) == 20
    sources = [passage.metadata for passage in example["passages"]()]
    missing = [q for q in QUESTIONS if {"file": q["file"], "heading": q["heading"]} not in sources]
    assert missing == []


def test_pages_are_cut_at_headings_and_not_in_code(example: dict[str, Any], tmp_path: Path) -> None:
    long = "\n".join(["word " * 50] * 10)
    page = f"# Page\nintro\n## One\n```sh\n# a comment\n```\n### Deep\nx\n## Two\n{long}\n"
    (tmp_path / "page.md").write_text(page)
    found = example["passages"](tmp_path)
    assert [p.metadata["heading"] for p in found] == ["Page", "One", "Deep", "Two", "Two", "Two"]
    assert found[1].page_content == "Page > One\n```sh\n# a comment\n```"
    assert found[2].page_content == "Page > One > Deep\nx"
    assert all(len(p.page_content) < 1300 for p in found)
    assert sum(p.page_content.count("word") for p in found) == 500


def test_most_sources_are_among_the_first_four(example: dict[str, Any]) -> None:
    by_words = example["DocsRetriever"].over(example["passages"](), None)
    assert example["recall"](by_words, QUESTIONS, words=1.0) >= 0.8


@pytest.mark.slow  # every passage is embedded
def test_most_sources_are_among_the_first_four_by_both(example: dict[str, Any], pocket: LLM) -> None:
    both = example["DocsRetriever"].over(example["passages"](), IngotEmbeddings(pocket))
    assert example["recall"](both, QUESTIONS, **example["WEIGHTS"]) >= 0.8


def test_ranks_of_both_are_joined_by_weight(example: dict[str, Any], retriever: Any) -> None:
    query = QUESTIONS[0]["question"]
    orders = {way: retriever._ranks(query, way) for way in ("words", "vectors")}
    for way, ranks in orders.items():
        alone = retriever.model_copy(update={"weights": {way: 1.0}}).invoke(query)
        assert alone == [retriever.passages[i] for i in ranks.argsort()[:4].tolist()]
    both = 0.9 / (60 + orders["words"]) + 0.1 / (60 + orders["vectors"])
    found = retriever.invoke(query)
    assert found == [retriever.passages[i] for i in both.argsort(descending=True)[:4].tolist()]


def test_an_answer_names_its_sources_and_fits(example: dict[str, Any], retriever: Any, pocket: LLM) -> None:
    chat = ChatIngot(model=pocket, max_tokens=8, temperature=0)
    text = example["answer"](chat, retriever, QUESTIONS[0]["question"], limit=300)
    assert "\n    [docs/terminal.md: Exit codes of the terminal]" in text
    answer = text.split("\n    [")[0]
    assert answer.strip()
