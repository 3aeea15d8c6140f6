"""``ingot explain`` and ``LLM.explain`` on a tiny engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM
from tests.e2e.terminal import ingot

CHAT = [{"role": "user", "content": "Hi\n é"}]


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Path:
    return tiny_engine


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(CHAT))
    return path


def test_the_prompt_is_the_one_that_runs(engine: Path, chat: Path) -> None:
    llm = LLM(engine, "cpu")
    reported = json.loads(ingot("explain", engine, "--messages", chat, "--temperature", 0.5, "--json").stdout)
    assert [token["id"] for token in reported["tokens"]] == llm.chat(CHAT).prompt_token_ids
    assert reported == json.loads(json.dumps(llm.explain(CHAT, {"temperature": 0.5}).to_json()))
    assert {s["id"] for s in reported["stops"]} == set(llm.engine.text.stop_ids)
    used = {value["name"]: value["value"] for value in reported["sampling"]}
    unnamed = {"grammar": None, "logit_bias": {}, "transcript": None}  # no flags' values
    assert used | unnamed == llm.default_params.replace(temperature=0.5).to_json()


def test_text(engine: Path, chat: Path) -> None:
    shown = ingot("explain", engine, "--messages", chat, "--stop", "x", "--top-p", 0.5)
    lines = shown.stdout.splitlines()
    assert lines[0] == "prompt (conversation by chatml)"
    assert "  <|im_start|>system" in lines
    assert any(line.split()[1:] == ["195", '"\\xc3"', "bytes", "c3"] for line in lines)
    assert any(line.split()[1:] == ["10", '"\\n"'] for line in lines)
    assert any(line.split()[:2] == ["256", "<|endoftext|>"] for line in lines)
    assert any(line.split()[:3] == ["--top-p", "0.5", "request"] for line in lines)
    assert "Hugging Face's generate, called with the same values," in lines


def test_nothing_is_loaded(tiny: Path, engine: Path, tmp_path: Path) -> None:
    """An engine whose weights are gone, and a checkpoint, can be explained."""
    copy = shutil.copytree(engine, tmp_path / "copy")
    (copy / "weights.safetensors").unlink()
    assert ingot("explain", copy, "--prompt", "Hi").exit_code == 0
    assert "room for 254" in ingot("explain", tiny, "--ids", "1 2").stdout


def test_stdin_and_an_object(engine: Path) -> None:
    shown = ingot("explain", engine, "--messages", "-", stdin=json.dumps({"messages": CHAT, "model": "x"}))
    assert shown.exit_code == 0
    assert "<|im_start|>user" in shown.stdout


def test_a_prompt_that_is_too_long_is_explained(engine: Path) -> None:
    shown = ingot("explain", engine, "--prompt", "a" * 200)
    assert shown.exit_code == 0
    assert "refused: the prompt has 200 tokens" in shown.stdout


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ((), "one of --messages, --prompt and --ids"),
        (("--prompt", "a", "--ids", "1"), "one of --messages, --prompt and --ids"),
        (("--ids", "1 b"), "--ids takes token ids"),
        (("--messages", "{none}"), "cannot be read"),
        (("--messages", "{text}"), "is not JSON"),
        (("--messages", "{number}"), "contains no conversation"),
        (("--messages", "{empty}"), "contains no conversation"),
        (("--prompt", "a", "--top-p", "7"), "--top-p"),
        (("--prompt", "a", "--min-new-tokens", "9"), "--min-new-tokens"),
        (("--prompt", "a", "--num-beams", "2", "--temperature", "1"), "--temperature"),
    ],
)
def test_misuse(engine: Path, tmp_path: Path, words: tuple[Any, ...], reported: str) -> None:
    for name, content in {"text": "hello", "number": "3", "empty": "[]"}.items():
        (tmp_path / name).write_text(content)
    shown = ingot("explain", engine, *(w.replace("{", f"{tmp_path}/").replace("}", "") for w in words))
    assert shown.exit_code == 2
    assert reported in " ".join(shown.stderr.replace("│", " ").split())


def test_roles_are_checked(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text('[{"role": "alien", "content": "Hi"}]')
    shown = ingot("explain", engine, "--messages", tmp_path / "chat.json")
    assert shown.exit_code == 2
    assert "messages[0].role" in shown.stderr
