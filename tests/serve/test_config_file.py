"""``--config``: the command line overrides the file, and errors in it are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.config.server_config import ServeConfig
from tests.e2e.terminal import ingot
from tests.serve.client import ROOT


class Served:
    """What the verb would serve."""

    def __init__(self, folder: Path, engine: Path) -> None:
        self.folder = folder
        self.engine = engine

    def __call__(self, text: str, *words: Any) -> Any:
        """The verb's result with a file of this text; ``{engine}`` in it is an engine."""
        path = self.folder / "serve.yaml"
        path.write_text(text.replace("{engine}", str(self.engine)), encoding="utf-8")
        return ingot("serve", "--config", str(path), *map(str, words))

    async def take(
        self, sides: Any, loads: Any, config: ServeConfig, *, api_key: Any, blanks: Any, on_ready: Any
    ) -> bool:
        assert blanks.keys() == loads.keys()
        self.names = [one.name for one in sides]
        self.loads, self.config, self.api_key = loads, config, api_key
        return False


@pytest.fixture
def served(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    found = Served(tmp_path, engine)
    monkeypatch.setattr("ingot.serve.server.serve", found.take)
    monkeypatch.setattr("ingot.cli.serve._started", lambda devices, beside: range(len(devices)))
    for name in ("INGOT_API_KEY", "INGOT_MODEL_NAME"):
        monkeypatch.delenv(name, raising=False)
    return found


BOTH = """
max-queue: 7
drain_seconds: 2
max-batch-size: 8
device: cpu
api-key: sesame
engines:
  - {engine}
  - path: {engine}
    name: second
    device: "cuda:1"
    memory-fraction: 0.25
    max-batch-size: 4
    batch-invariant: true
    prompt-share: 0.2
"""


def test_engines_with_values_of_their_own(served: Served) -> None:
    assert served(BOTH).exit_code == 0
    assert served.names == ["pocket", "second"]
    first, second = served.loads.values()
    assert (first.device, second.device) == ("cpu", "cuda:1")
    assert (first.max_batch_size, second.max_batch_size) == (8, 4)
    assert "memory_fraction" not in first.runtime or first.runtime["memory_fraction"] == 0.9
    assert (second.runtime["memory_fraction"], second.runtime["batch_invariant"]) == (0.25, True)
    assert (first.runtime.get("prompt_share"), second.runtime["prompt_share"]) == (None, 0.2)
    assert (served.config.max_queue, served.config.drain_seconds) == (7, 2.0)
    assert served.api_key == "sesame"


def test_the_command_line_counts_first(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_API_KEY", "from the environment")
    words = ("--max-queue", 9, "--device", "auto", "--max-batch-size", 2, "--name", "a", "--name", "b")
    assert served(BOTH, *words).exit_code == 0
    assert served.names == ["a", "b"]
    assert [one.device for one in served.loads.values()] == ["auto", "auto"]
    assert [one.max_batch_size for one in served.loads.values()] == [2, 2]
    assert served.config.max_queue == 9
    assert served.api_key == "from the environment"
    assert served(BOTH, "--port", 0).exit_code == 0
    assert served.config.port == 0


@pytest.mark.parametrize(
    ("value", "expected"), [("qwen", ["qwen"]), ("", ["pocket"]), ("  modèle-7b ", ["modèle-7b"])]
)
def test_a_name_from_the_environment(
    served: Served, monkeypatch: pytest.MonkeyPatch, value: str, expected: list[str]
) -> None:
    monkeypatch.setenv("INGOT_MODEL_NAME", value)
    assert served("port: 0", served.engine).exit_code == 0
    assert served.names == expected
    assert served("port: 0", served.engine, "--name", "given").exit_code == 0
    assert served.names == ["given"]
    monkeypatch.setenv("INGOT_MODEL_NAME", "a b")
    assert served("port: 0", served.engine, served.engine).exit_code == 0
    assert served.names == ["a", "b"]
    failed = served("port: 0", served.engine)
    assert (failed.exit_code, "one name for each engine" in failed.stderr) == (2, True)


def test_engines_of_the_command_line_replace_those_of_the_file(served: Served) -> None:
    assert served(BOTH, served.engine, "--name", "only").exit_code == 0
    assert served.names == ["only"]
    assert served.loads["only"].device == "cpu"


def test_a_device_for_each_engine(served: Served) -> None:
    words = (
        served.engine,
        served.engine,
        "--name",
        "a",
        "--name",
        "b",
        "--device",
        "cpu",
        "--device",
        "cuda",
    )
    assert served("port: 0", *words).exit_code == 0
    assert [one.device for one in served.loads.values()] == ["cpu", "cuda"]
    result = served("port: 0", *words, "--device", "cpu")
    assert (result.exit_code, "one device for each engine" in result.stderr) == (2, True)
    assert served("engines: {engine}\nname: [x]\ndevice: [cpu]").exit_code == 0
    assert served.names == ["x"]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("max-quue: 3", "did you mean max-queue?"),
        ("engine: x", "did you mean engines?"),
        ("zzz: 3", "engines, host, port"),
        ("engines:\n  - path: x\n    max-bach-size: 3", "did you mean max-batch-size?"),
        ("engines:\n  - path: x\n    port: 3", "engines[0]"),
        ("engines:\n  - x\n  - name: b", "engines[1]"),
        ("engines: [3]", "engines[0]"),
        ("engines: []", "no engine is named"),
        ("port: '80'", "an integer"),
        ("port: true", "an integer"),
        ("port: 70000", "0 to 65535"),
        ("max-queue: -1", ">= 0"),
        ("drain-seconds: .nan", "out of range"),
        ("threads: 0", ">= 1"),
        ("unproven: 1", "true or false"),
        ("api-key: 0123", "a text"),
        ("name: [1]", "a text"),
        ("host: [a]", "a text"),
        ("- 3", "flags and their values"),
        ("3: 4", "flags and their values"),
        ("", "flags and their values"),
        ("port: [", "not YAML"),
        ("port: &a 3\nmax-queue: *a", "aliases"),
        ("kv-dtype: int3\nengines: {engine}", "unknown kv_dtype"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_wrong_is_named(served: Served, text: str, reported: str) -> None:
    result = served(text)
    assert result.exit_code == 2, result.stderr
    assert reported in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_is_not_there(served: Served, tmp_path: Path) -> None:
    result = ingot("serve", "--config", str(tmp_path / "none.yaml"))
    assert (result.exit_code, "none.yaml" in result.stderr) == (2, True)
    assert ingot("serve").exit_code == 2


def test_the_example(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "examples" / "serve.yaml").read_text(encoding="utf-8")
    monkeypatch.chdir(ROOT)
    assert served(text.replace("- engines/pocket-chat", "- {engine}")).exit_code == 0
    assert served.names == ["pocket", "pocket-small"]
    assert served.loads["pocket-small"].max_seq_len == 256
