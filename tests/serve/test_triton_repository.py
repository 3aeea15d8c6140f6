"""The model repository that `ingot triton` writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ingot.adapters.triton.model_repository import config_text, write_model
from ingot.adapters.triton.triton_settings import Settings
from ingot.adapters.triton.triton_tensors import INPUTS, OUTPUTS
from ingot.cli.main import app
from ingot.errors import BuildError, ConfigError, RequestError
from tests.serve.client import ROOT

TOKEN = re.compile(r'(\s+|#[^\n]*)|("(?:[^"\\\n]|\\.)*"|[\[\]{}:]|[\w-]+)')


def parsed(text: str) -> dict[str, list[Any]]:
    """A message in protobuf's text format: field → its values. Fails where the format is not kept."""
    tokens, end = [], 0
    while end < len(text):
        match = TOKEN.match(text, end)
        assert match, text[end:]
        tokens += [match[2]] if match[2] else []
        end = match.end()
    found = message(tokens)
    assert tokens == []
    return found


def message(tokens: list[str]) -> dict[str, list[Any]]:
    """The fields up to a closing brace or the end."""
    found: dict[str, list[Any]] = {}
    while tokens and tokens[0] != "}":
        name = tokens.pop(0)
        assert re.fullmatch("[a-z_]+", name), name
        if tokens[0] == ":":
            tokens.pop(0)
        values = found.setdefault(name, [])
        if tokens[0] != "[":
            values.append(value(tokens))
            continue
        while tokens.pop(0) != "]":
            values.append(value(tokens))
    return found


def value(tokens: list[str]) -> Any:
    """A message in braces, a text, or a word."""
    token = tokens.pop(0)
    if token != "{":
        return json.loads(token) if token.startswith('"') else token
    found = message(tokens)
    assert tokens.pop(0) == "}"
    return found


def parameters(config: dict[str, list[Any]]) -> dict[str, str]:
    """The parameters of a parsed config.pbtxt."""
    return {one["key"][0]: one["value"][0]["string_value"][0] for one in config["parameters"]}


def verb(*words: object) -> Any:
    return CliRunner().invoke(app, ["triton", *map(str, words)])


def test_a_config_has_tensors_and_instances() -> None:
    config = parsed(config_text("pocket", Settings("/engines/pocket"), None))
    assert config["name"] == ["pocket"]
    assert config["backend"] == ["python"]
    assert config["max_batch_size"] == ["0"]
    assert config["model_transaction_policy"] == [{"decoupled": ["true"]}]
    assert config["instance_group"] == [{"count": ["1"], "kind": ["KIND_CPU"]}]
    assert "dynamic_batching" not in config
    for field, tensors in (("input", INPUTS), ("output", OUTPUTS)):
        expected = [(one.name, f"TYPE_{one.kind}", str(one.size)) for one in tensors]
        assert [(x["name"][0], x["data_type"][0], x["dims"][0]) for x in config[field]] == expected
    assert [one["name"] for one in config["input"] if "optional" not in one] == [["text_input"]]
    assert [one["name"] for one in config["input"] if one["dims"] == ["-1"]] == [["image"]]


def test_a_gpu_is_named_by_its_number() -> None:
    config = parsed(config_text("pocket", Settings("/engines/pocket"), 3))
    assert config["instance_group"] == [{"count": ["1"], "kind": ["KIND_GPU"], "gpus": ["3"]}]


@pytest.mark.parametrize(
    "settings",
    [
        Settings('/engines/a "b" \\ é\n#c {x: 1}'),
        Settings("e", unproven=True, max_queue=0, max_batch_size=8, max_seq_len=256, threads=2),
        Settings(
            "e",
            memory_fraction=0.45,
            cache_tokens=4096,
            token_budget=512,
            kv_dtype="int8",
            embedding="host",
            batch_invariant=True,
        ),
    ],
    ids=["path", "limits", "memory"],
)
def test_settings_survive_a_round_trip(settings: Settings) -> None:
    assert Settings.read(parameters(parsed(config_text("pocket", settings, None)))) == settings


def test_a_parameter_that_is_not_given_is_there_to_be_filled_in() -> None:
    text = config_text("pocket", Settings("e"), None)
    line = '# parameters { key: "max_batch_size" value { string_value: "" } }'
    assert line in text
    edited = text.replace(line, line.removeprefix("# ").replace('string_value: ""', 'string_value: "16"'))
    assert Settings.read(parameters(parsed(edited))).max_batch_size == 16


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({}, "names no engine"),
        ({"engine": "e", "max_batchsize": "8"}, "unknown parameter in config.pbtxt; seen: max_batchsize"),
        ({"engine": "e", "max_batch_size": "many"}, "max_batch_size cannot be read"),
        ({"engine": "e", "unproven": "yes"}, "allowed: true or false"),
        ({"engine": "e", "memory_fraction": "1.5"}, "memory_fraction is out of range"),
        ({"engine": "e", "max_seq_len": "0"}, "max_seq_len is too small"),
        ({"engine": "e", "max_queue": "-1"}, "max_queue is too small"),
    ],
)
def test_an_impossible_parameter_is_refused(given: dict[str, str], reported: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reported)):
        Settings.read(given)


def test_names_in_capitals_are_triton_s_own() -> None:
    assert Settings.read({"engine": "e", "EXECUTION_ENV_PATH": "/x.tar.gz"}) == Settings("e")


def test_a_linked_model_holds_the_engine_s_path(engine: Path, tmp_path: Path) -> None:
    done = verb(engine, "-o", tmp_path, "--name", "story", "--device", "cpu", "--max-batch-size", 8)
    assert done.exit_code == 0, done.output
    assert str(engine) in done.output.replace("\n", "")
    config = parsed((tmp_path / "story" / "config.pbtxt").read_text(encoding="utf-8"))
    assert config["name"] == ["story"]
    settings = Settings.read(parameters(config))
    assert settings.folder(tmp_path / "story" / "1") == engine
    assert settings.load("cpu", tmp_path).max_batch_size == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["story"]


def test_a_copied_model_can_be_moved(engine: Path, tmp_path: Path) -> None:
    assert verb(engine, "-o", tmp_path / "a", "--copy", "--device", "cpu").exit_code == 0
    (tmp_path / "a").rename(tmp_path / "b")
    folder = tmp_path / "b" / engine.name
    assert str(tmp_path) not in (folder / "config.pbtxt").read_text(encoding="utf-8")
    settings = Settings.read(parameters(parsed((folder / "config.pbtxt").read_text(encoding="utf-8"))))
    copied = settings.folder(folder / "1")
    assert {path.name for path in copied.iterdir()} == {path.name for path in engine.iterdir()}
    assert (copied / "manifest.json").read_bytes() == (engine / "manifest.json").read_bytes()


def test_a_gpu_of_another_machine_can_be_named(engine: Path, tmp_path: Path) -> None:
    assert verb(engine, "-o", tmp_path, "--device", "cuda:1").exit_code == 0
    config = parsed((tmp_path / engine.name / "config.pbtxt").read_text(encoding="utf-8"))
    assert config["instance_group"][0]["gpus"] == ["1"]


def test_an_unproven_engine_needs_leave(engine: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(engine, tmp_path / "unproven", ignore=shutil.ignore_patterns("proof.json"))
    refused = verb(folder, "-o", tmp_path / "repo", "--device", "cpu")
    assert refused.exit_code == 1
    assert "is not served: the engine is unproven" in refused.output
    assert not (tmp_path / "repo").exists()
    assert verb(folder, "-o", tmp_path / "repo", "--device", "cpu", "--unproven").exit_code == 0
    config = parsed((tmp_path / "repo" / "unproven" / "config.pbtxt").read_text(encoding="utf-8"))
    assert Settings.read(parameters(config)).unproven


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--name", "a/b"), "a model's name cannot be this"),
        (("--device", "gpu"), "unknown device"),
        (("--memory-fraction", "2"), "memory-fraction"),
        (("--max-queue", "-1"), "max-queue"),
    ],
)
def test_flags_that_cannot_be_are_misuse(engine: Path, tmp_path: Path, words: Any, reported: str) -> None:
    done = verb(engine, "-o", tmp_path / "repo", *words)
    assert done.exit_code == 2
    assert reported in done.output
    assert not (tmp_path / "repo").exists()


def test_a_checkpoint_is_refused(tmp_path: Path) -> None:
    done = verb(ROOT / "models" / "pocket-chat", "-o", tmp_path / "repo")
    assert done.exit_code == 2
    assert "not an engine: no manifest.json" in done.output


def test_a_model_is_replaced_only_when_asked(engine: Path, tmp_path: Path) -> None:
    settings = Settings(str(engine))
    folder = write_model(tmp_path, "pocket", settings, gpu=None, copy=False)
    with pytest.raises(BuildError, match="the model exists"):
        write_model(tmp_path, "pocket", settings, gpu=None, copy=False)
    write_model(tmp_path, "pocket", settings, gpu=0, copy=False, force=True)
    assert "KIND_GPU" in (folder / "config.pbtxt").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["pocket"]


def test_what_is_not_ours_is_never_replaced(engine: Path, tmp_path: Path) -> None:
    other = tmp_path / "pocket"
    other.mkdir()
    (other / "config.pbtxt").write_text('name: "pocket"\nbackend: "onnxruntime"\n')
    with pytest.raises(BuildError, match="something else is there already"):
        write_model(tmp_path, "pocket", Settings(str(engine)), gpu=None, copy=False, force=True)
    assert "onnxruntime" in (other / "config.pbtxt").read_text()


def test_a_copy_that_fails_leaves_nothing(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="the model cannot be written"):
        write_model(tmp_path, "pocket", Settings(str(engine / "nothing")), gpu=None, copy=True)
    assert list(tmp_path.iterdir()) == []


def test_a_name_in_two_parts_is_refused(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="name cannot be this"):
        write_model(tmp_path, "..", Settings(str(engine)), gpu=None, copy=False)


def test_a_model_without_ingot_says_what_to_install(engine: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "pocket", Settings(str(engine)), gpu=None, copy=False)
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['TritonPythonModel']().initialize({})"
    words = [sys.executable, "-I", "-S", "-c", code, str(folder / "1" / "model.py")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install '.[serve]'" in done.stderr
