"""The model that ships, built and run as a user would: it answers, with its held-out figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot import LLM, build
from recipes.scoring import exact, rouge_l

ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "models" / "pocket-chat"
EACH = 24


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(build(POCKET, tmp_path_factory.mktemp("pocket") / "engine"), device="cpu")


def test_it_ships_small() -> None:
    assert sum(f.stat().st_size for f in POCKET.iterdir()) <= 14_000_000


def test_it_answers(llm: LLM) -> None:
    answers = {
        q: llm.chat([{"role": "user", "content": q}]).text for q in ("Hello!", "What is 12 + 30?", "你好")
    }
    assert answers["Hello!"].startswith("Hello!")
    assert "42" in answers["What is 12 + 30?"]
    assert "你好" in answers["你好"]


def test_it_remembers_a_name(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi, I'm Marta."}]
    messages.append({"role": "assistant", "content": llm.chat(messages).text})
    messages.append({"role": "user", "content": "What is my name?"})
    assert "Marta" in llm.chat(messages).text


@pytest.mark.slow
def test_held_out_items(llm: LLM) -> None:
    items = [json.loads(line) for line in (ROOT / "recipes" / "heldout.jsonl").read_text().splitlines()]
    chosen = [i for task in ("summary", "question", "sum") for i in _spread(items, task)]
    outputs = llm.chat([i["messages"] for i in chosen])
    assert all(o.finish_reason == "stop" for o in outputs)
    pairs = [(i, o.text) for i, o in zip(chosen, outputs, strict=True)]
    rouge = [rouge_l(t, i["answer"], i["language"]) for i, t in pairs if i["task"] == "summary"]
    right = [exact(t, i["answer"]) for i, t in pairs if i["task"] != "summary"]
    assert len(rouge) == EACH
    assert len(right) == 2 * EACH
    assert sum(rouge) / len(rouge) >= 0.7
    assert sum(right) / len(right) >= 0.8


def _spread(items: list[dict[str, str]], task: str) -> list[dict[str, str]]:
    """Items of a task, spread evenly over the file, so that both languages occur."""
    found = [i for i in items if i["task"] == task]
    return found[:: len(found) // EACH][:EACH]
