"""A separate chat template for requests with tools, from a list or a folder, as in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from ingot import build
from ingot.checkpoint.checkpoint_files import list_files, small_files
from ingot.engine.engine_text import read_engine_text
from ingot.engine.manifest import Manifest
from ingot.errors import CheckpointError, RequestError, TokenizerError
from ingot.text.chat.chat_renderer import load_chat_format
from ingot.text.tokenizer.tokenizer import load_tokenizer
from tests.e2e.tiny import write_tiny
from tests.unit.chat_cases import user

PLAIN = "D:{{ messages[0].content }}"
TOOL_USE = "T:{{ tools | tojson }}{{ messages[0].content }}<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
HELLO = user("Hello")
EXTRA = "additional_chat_templates"


def as_list(folder: Path, **templates: str) -> None:
    named = [{"name": name, "template": text} for name, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))


def as_files(folder: Path, **templates: str) -> None:
    (folder / EXTRA).mkdir()
    for name, text in templates.items():
        file = "chat_template.jinja" if name == "default" else f"{EXTRA}/{name}.jinja"
        (folder / file).write_text(text)


Written = Callable[..., None]
WAYS = pytest.mark.parametrize("write", [as_list, as_files], ids=["list", "files"])


@WAYS
@pytest.mark.parametrize(
    "names", [("default", "tool_use"), ("default", "rag"), ("default", "tool_use", "rag")]
)
def test_as_transformers(write: Written, names: tuple[str, ...], tmp_path: Path) -> None:
    templates = {"default": PLAIN, "tool_use": TOOL_USE, "rag": "R"}
    write(tmp_path, **{name: templates[name] for name in names})
    chat = load_chat_format(tmp_path, {})
    assert chat is not None
    theirs: Any = transformers.PreTrainedTokenizerBase()
    theirs.chat_template = {name: templates[name] for name in names}
    assert ("tools" in chat.variables) == ("tool_use" in names)
    given: list[dict[str, Any]] = [{}, {"tools": None}]
    if "tool_use" in names:
        given += [{"tools": TOOLS}, {"tools": []}]
    for variables in given:
        expected = theirs.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True, **variables)
        found = chat.prompt_text(HELLO, variables={k: v for k, v in variables.items() if v is not None})
        assert found == expected


@WAYS
def test_tools_alone(write: Written, tmp_path: Path) -> None:
    """Without a default a request without tools is refused, when it comes."""
    write(tmp_path, tool_use=TOOL_USE)
    chat = load_chat_format(tmp_path, {})
    assert chat is not None
    assert chat.prompt_text(HELLO, variables={"tools": TOOLS}).startswith("T:[{")
    with pytest.raises(RequestError, match=r"requests with tools.*none named default"):
        chat.prompt_text(HELLO)


@pytest.mark.parametrize("named", [{}, {"rag": "R"}, {"default": 7}, {"default": "D", "tool_use": None}])
def test_lists_without_a_text(named: dict[str, Any], tmp_path: Path) -> None:
    as_list(tmp_path, **named)
    with pytest.raises(TokenizerError, match=r"a list with a text named default or tool_use"):
        load_chat_format(tmp_path, {})


def test_a_template_that_does_not_parse_is_named(tmp_path: Path) -> None:
    as_files(tmp_path, default=PLAIN, tool_use="{% for %}")
    with pytest.raises(TokenizerError, match=rf"{EXTRA}/tool_use\.jinja"):
        load_chat_format(tmp_path, {})


def test_files_take_precedence_over_the_list(tmp_path: Path) -> None:
    """chat_template.jinja replaces the list of tokenizer_config.json."""
    as_list(tmp_path, default="old", tool_use="old tools")
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}" + PLAIN)
    chat = load_chat_format(tmp_path, {})
    assert chat is not None
    assert chat.prompt_text(HELLO, variables={"tools": []}) == "[]D:Hello"


@pytest.mark.parametrize("thinks", ["default", "tool_use"])
def test_either_may_think_and_end_turns(thinks: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "qwen")
    other = {"default": PLAIN, "tool_use": "{{ tools }}"} | {thinks: "</think><|im_end|>{{ tools }}"}
    as_list(folder, **other)
    chat = load_chat_format(folder, {})
    assert chat is not None
    assert chat.thinks
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.special_tokens["<|im_end|>"] in chat.stop_ids(tokenizer)


@WAYS
def test_an_engine_has_both(write: Written, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "qwen")
    write(folder, default=PLAIN, tool_use=TOOL_USE)
    engine = build(folder, tmp_path / "engine", device="cpu", proof=False)
    chat = read_engine_text(engine, Manifest.read(engine)).chat
    assert chat is not None
    assert chat.prompt_text(HELLO) == "D:Hello"
    assert chat.prompt_text(HELLO, variables={"tools": TOOLS}).startswith("T:[{")


def test_a_chosen_template_takes_the_place_of_both(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "qwen")
    as_files(folder, default=PLAIN, tool_use=TOOL_USE)
    (tmp_path / "own.jinja").write_text("O:{{ messages[0].content }}{{ tools }}")
    chosen = str(tmp_path / "own.jinja")
    engine = build(folder, tmp_path / "engine", device="cpu", proof=False, chat_template=chosen)
    chat = read_engine_text(engine, Manifest.read(engine)).chat
    assert chat is not None
    assert chat.prompt_text(HELLO, variables={"tools": []}) == "O:Hello[]"


def test_it_is_downloaded_and_links_may_not_lead_out(tmp_path: Path) -> None:
    names = ["config.json", f"{EXTRA}/tool_use.jinja", f"{EXTRA}/run.py", "onnx/config.json"]
    assert small_files(names) == ["config.json", f"{EXTRA}/tool_use.jinja"]
    folder = write_tiny(tmp_path / "qwen")
    (tmp_path / "secret").write_text("secret")
    (folder / EXTRA).mkdir()
    (folder / EXTRA / "tool_use.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="lead outside"):
        list_files(folder)
