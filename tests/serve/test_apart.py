"""Isolation of a server's users from each other and from changed engine folders.

One server with ``--private-prefixes`` and ``--closed-objects``, of an engine's copy whose template is changed
while it runs. The other one shares prefixes, as servers do by default.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.engine.manifest import Manifest
from ingot.errors import EngineError
from ingot.serve.engine_calls.text_files import TextFiles, check_manifest
from ingot.serve.long_prompts import LONG
from tests.serve.client import Server, started
from tests.serve.conftest import NAME

RESPONSES, CHAT, COMPLETIONS = "/v1/responses", "/v1/chat/completions", "/v1/completions"
OPEN = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}


@pytest.fixture(scope="module")
def copied(tool_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tool_engine, tmp_path_factory.mktemp("apart") / "copied"))


@pytest.fixture(scope="module")
def private(copied: Path) -> Iterator[Server]:
    with started(copied, "--private-prefixes", "--closed-objects", "--name", NAME) as found:
        yield found


def cached(server: Server, text: str, salt: str | None = None) -> int:
    """Tokens of a prompt that ``/v1/responses`` counts as found."""
    body = {"model": NAME, "input": text * 40, "max_output_tokens": 2, "cache_salt": salt}
    usage = server.post(RESPONSES, body).json["usage"]
    events = list(server.stream(RESPONSES, body))  # a stream counts likewise, and finds what it may
    streamed = events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"]
    again = server.post(RESPONSES, body).json["usage"]["input_tokens_details"]["cached_tokens"]
    assert streamed == again
    assert usage["input_tokens"] > 64
    return int(again)


def test_responses_count_what_the_cache_had(server: Server) -> None:
    before = server.metric("ingot_prefix_cache_hits_total", model_name=NAME)
    found = cached(server, "What was found? ")
    assert found >= 64
    assert server.metric("ingot_prefix_cache_hits_total", model_name=NAME) == before + 2 * found


@pytest.mark.grid(1)
@pytest.mark.parametrize("form", [{}, {"guided_regex": "a{9}"}], ids=["plain", "grammar"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_salt_separates_the_cache(server: Server, path: str, form: dict[str, str]) -> None:
    """Of equal prompts each salt finds its own; none finds what came without."""
    text = f"Secret {len(form)} of {path}. " * 8
    asked: Any = {CHAT: {"messages": [{"role": "user", "content": text}]}, COMPLETIONS: {"prompt": text}}
    body = {"model": NAME, "max_tokens": 1, **form} | asked.get(path, {"input": text})

    def hits(**salt: str) -> bool:
        before = server.metric("ingot_prefix_cache_hits_total", model_name=NAME)
        assert server.post(path, body | salt).status == 200
        return server.metric("ingot_prefix_cache_hits_total", model_name=NAME) > before

    found = [hits(), hits(), hits(cache_salt="a"), hits(cache_salt="a"), hits(cache_salt="b"), hits()]
    assert found == [False, True, False, True, False, True]


def test_what_is_read_of_a_prompt_leaves_nothing_to_find(server: Server) -> None:
    """Echoed and embedded prompts look for no prefix, but put theirs into the cache."""
    for number, (path, body) in enumerate(
        [(COMPLETIONS, {"echo": True, "logprobs": 0, "max_tokens": 0}), ("/v1/embeddings", {})]
    ):
        text = f"The answer is {number}, as before. " * 20
        field = "input" if path == "/v1/embeddings" else "prompt"
        assert server.post(path, {"model": NAME, field: text, "cache_salt": "a", **body}).status == 200
        before = server.metric("ingot_prefix_cache_hits_total", model_name=NAME)
        server.post(COMPLETIONS, {"model": NAME, "prompt": text, "max_tokens": 1})
        assert server.metric("ingot_prefix_cache_hits_total", model_name=NAME) == before
        server.post(COMPLETIONS, {"model": NAME, "prompt": text, "max_tokens": 1, "cache_salt": "a"})
        assert server.metric("ingot_prefix_cache_hits_total", model_name=NAME) > before


def test_without_a_salt_nothing_is_shared_where_prefixes_are_private(private: Server) -> None:
    assert cached(private, "Nobody's. ") == 0
    assert cached(private, "Nobody's. ", "mine") >= 64
    assert cached(private, "Nobody's. ") == 0


@pytest.mark.parametrize("salt", ["", "a" * 1025, 7])
def test_bad_salts(server: Server, salt: Any) -> None:
    reply = server.post(
        CHAT, {"model": NAME, "messages": [{"role": "user", "content": "a"}], "cache_salt": salt}
    )
    assert (reply.status, reply.error["param"]) == (400, "cache_salt")


def test_objects_are_closed(private: Server, server: Server) -> None:
    """The bias is for a comma: what an open object goes on with, a closed one cannot."""
    comma = private.post("/tokenize", {"prompt": ',"', "add_special_tokens": False}).json["tokens"]
    comma += private.post("/tokenize", {"prompt": ",", "add_special_tokens": False}).json["tokens"]
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 12,
        "guided_json": OPEN | {"x-guidance": {"whitespace_pattern": ""}},
        "logit_bias": {str(token): 100 for token in comma},
    }
    found = {one: private_or_open.post(CHAT, body).json["choices"][0] for one, private_or_open in
             (("closed", private), ("open", server))}  # fmt: skip
    assert set(json.loads(found["closed"]["message"]["content"])) == {"a"}
    assert found["open"]["message"]["content"].count('"') > 2


def test_a_changed_template_changes_no_prompt(private: Server, copied: Path) -> None:
    """Short prompts are templated by the server, long ones by a process that starts with the first one."""
    template = copied / "tokenizer" / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("<|im_start|>assistant", "NEW <|im_start|>assistant"))
    try:
        ends = []
        for content in ("ab", "ab " * LONG):
            body = {"messages": [{"role": "user", "content": content}], "return_token_strs": True}
            ends.append(private.post("/tokenize", body).json["token_strs"][-5:])
        assert ends[0] == ends[1]
        assert "NEW" not in "".join(ends[0])
    finally:
        template.write_text(text)


def test_copies_are_those_of_the_build(copied: Path) -> None:
    manifest = Manifest.read(copied)
    kept = TextFiles(copied, manifest, ())
    assert {file.name for file in kept.folder.iterdir()} == set(manifest.files)
    check_manifest(copied, kept.manifest)
    check_manifest(copied, None)
    with pytest.raises(EngineError, match="has changed since the server started"):
        check_manifest(copied, "0" * 64)
    name = next(iter(manifest.files))
    (copied / "tokenizer" / name).rename(copied / "aside")
    try:
        with pytest.raises(EngineError, match="cannot be copied"):
            TextFiles(copied, manifest, ())
        (copied / "tokenizer" / name).write_bytes(b"other")
        with pytest.raises(EngineError, match="has changed since the build"):
            TextFiles(copied, manifest, ())
    finally:
        (copied / "aside").replace(copied / "tokenizer" / name)


def test_copies_of_a_checkpoint_are_the_files_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "weights").write_text("large")
    kept = TextFiles(tmp_path, Manifest.__new__(Manifest), [tmp_path / "tokenizer.json"])
    assert [file.name for file in kept.folder.iterdir()] == ["tokenizer.json"]
    assert kept.manifest is None
    place = kept.folder
    del kept
    assert not place.exists()
