"""Hostile files (deep, huge, wrong types, escape codes): each is one clear error of a verb."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot import LLM
from ingot.config.files.json_text import MAX_BYTES, JsonError, load_json, parse_json
from ingot.errors import ConfigError, EngineError, IngotError, RequestError
from ingot.proof.repro_bundle import read_bundle, write_bundle
from ingot.proof.repro_run import capture_layer, replay
from tests.e2e.folders import ROOT
from tests.e2e.terminal import ingot
from tests.forked import MAY_FORK
from tests.tiny_models import random_ids

TEXTS = {
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a": ' * 100_000 + "1" + "}" * 100_000,
    "as deep as Python reads": '{"a": ' * 400 + "1" + "}" * 400,
    "half a character": '{"eos_token_id": "\\ud800"}',
    "a number of 5000 digits": f'{{"eos_token_id": {"9" * 5000}}}',
    "a list": "[]",
    "a number": "7",
    "nothing": "",
    "not UTF-8": "\udcff",
}
WHOLE = ("as deep as Python reads", "half a character")  # what a plain reader takes
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    "quantize_config.json",
)
ENGINE_FILES = ("manifest.json", "proof.json", "plan.json", "verify.json")


@pytest.fixture(scope="module")
def checkpoint(tiny: Path) -> Path:
    return tiny


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Path:
    return tiny_engine


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


def refused(*words: object) -> str:
    """What a verb says when it fails: a few lines, printable, without a traceback."""
    result = ingot(*words)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    assert "error:" in result.stderr
    assert len(result.stderr) < 6000
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", result.output)
    return str(result.stderr)


# --- JSON and YAML ---------------------------------------------------------------------------------------


@pytest.mark.stays("config.json", "added_tokens.json", "quantize_config.json")
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_json_of_a_checkpoint(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """It is refused by its name, or does not matter; what can be read can be written into an engine."""
    copy, engine = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint")), tmp_path / "engine"
    if name == "model.safetensors.index.json":
        (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    for kind, text in TEXTS.items():
        write(copy / name, text)
        for verb in (("inspect", copy), ("build", copy, "-o", engine, "--device", "cpu"))[
            : 1 + (kind in WHOLE)
        ]:
            if ingot(*verb).exit_code:
                assert name.partition(".")[0] in refused(*verb)
            shutil.rmtree(engine, ignore_errors=True)


@pytest.mark.stays("manifest.json", "verify.json")
@pytest.mark.parametrize("name", ENGINE_FILES)
def test_json_of_an_engine(engine: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "engine"))
    for kind, text in TEXTS.items():
        write(copy / name, text)
        for verb in (("inspect", copy), ("run", copy, "a", "--device", "cpu"))[: 1 + (kind in WHOLE)]:
            if ingot(*verb).exit_code:
                assert name in refused(*verb)
        ingot("diff", engine, copy)


@pytest.mark.parametrize("kind", TEXTS)
def test_json_that_flags_name(engine: Path, checkpoint: Path, tmp_path: Path, kind: str) -> None:
    lines, whole = write(tmp_path / "a.jsonl", TEXTS[kind]), write(tmp_path / "a.json", TEXTS[kind])
    yaml = write(tmp_path / "a.yaml", TEXTS[kind])
    built = ("build", checkpoint, "-o", tmp_path / "engine", "--device", "cpu")
    for verb in (
        ("run", engine, "--file", lines, "--device", "cpu"),
        ("run", engine, "--file", lines, "--raw", "--device", "cpu"),
        ("explain", engine, "--messages", whole),
        ("eval", "perplexity", engine, "--data", lines, "--device", "cpu"),
        ("eval", "perplexity", engine, "--data", whole, "--device", "cpu"),
        ("bench", "throughput", engine, "--requests", whole, "--device", "cpu"),
        (*built, "--plan", whole),
        (*built, "--quant", yaml),
        (*built, "--quant", "w4a16", "--method", "gptq", "--calib", lines),
        (*built, "--quant", "w4a16", "--method", "gptq", "--calib", whole),
    ):
        refused(*verb)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 20,
        "a: " + "{a: " * 100_000,
        "\n".join("  " * i + "a:" for i in range(2000)),
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nlayers: *c",
        "group: 2026-13-45",
        "group: " + "9" * 5000,
        "scheme: !!python/object/apply:os.system [id]",
        "? [a]\n: b",
        "scheme: \x00",
        "scheme: w4a16\ngroup: .inf",
    ],
    ids=range(10),
)
def test_yaml(text: str, tmp_path: Path) -> None:
    refused("plan", ROOT / "models" / "pocket-chat", "--quant", write(tmp_path / "a.yaml", text))


def test_depths_and_sizes(tmp_path: Path) -> None:
    """100 levels pass, and 101 do not; a file is not read before its size is known."""
    assert parse_json("[" * 100 + "]" * 100)
    for text in ("[" * 101 + "]" * 101, '{"a":' * 101 + "[]" + "}" * 101):
        with pytest.raises(JsonError, match="100 levels"):
            parse_json(text)
    assert parse_json('"\\ud83d\\ude00 \\\\ud800"') == "😀 \\ud800"
    with pytest.raises(JsonError, match="UTF-16"):
        parse_json('{"a": ["\\uDC00"]}')
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(JsonError, match="larger than 64 MiB"):
        load_json(tmp_path / "huge.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "chat_template.jinja"])
def test_files_of_ten_gigabytes(checkpoint: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    with (copy / name).open("wb") as file:
        file.truncate(10 << 30)
    reported = refused("inspect", copy)
    assert name in reported
    assert re.search("64 MiB|10240 MiB", reported)


# --- bundles ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "b.safetensors"
    write_bundle(path, capture_layer(LLM(engine, "cpu"), random_ids(9), 0, 1))
    return path


def with_facts(path: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["ingot_repro"])
    change(facts)
    save_file(load_file(path), target, {"ingot_repro": json.dumps(facts)})
    return target


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("block_size", value) for value in (0, -5, 10**12, 2**40, 48, 1.5, True, None, "64")],
        *[("floor", value) for value in (float("inf"), float("nan"), -1.0, None, "1", True)],
        ("token_floor", float("inf")),
        *[("counts", value) for value in ([0, 10], [-5, 15], [10**12], [], [9.0, 1.0], 10, None)],
        *[("layer", value) for value in (-1, 1.5, "0", None)],
        *[("dtype", value) for value in ("banana", 3, None)],
        *[("kv_dtype", value) for value in ("int4", 8)],
        *[("machine", value) for value in (None, [], "x")],
        *[("model", value) for value in (None, {}, "x")],
        ("output_error", "x"),
        ("engine", 3),
    ],
)
def test_facts_of_a_bundle(bundle: Path, tmp_path: Path, field: str, value: object) -> None:
    changed = with_facts(bundle, tmp_path / "c.safetensors", lambda facts: facts.update({field: value}))
    with pytest.raises(EngineError, match="damaged"):
        read_bundle(changed)
    assert field in refused("repro", "--run", changed, "--device", "cpu")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("generation",), [1]),
        (("stop_ids",), ["a"]),
        (("source_dtype",), {}),
        (("model", "rope", "dim"), 1e308),
        (("model", "num_layers"), True),
        (("build", "max_batch_size"), "64"),
        (("quant", "group"), 1.5),
        (("tensors", "norm.weight", "dtype"), []),
        (("tensors", "norm.weight", "shape"), [1.5]),
        (("tensors", "norm.weight", "sha256"), 1),
    ],
    ids=lambda one: str(one)[:30],
)
def test_values_of_a_manifest(engine: Path, tmp_path: Path, keys: tuple[str, ...], value: object) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(engine, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    inner = manifest
    for key in keys[:-1]:
        inner = inner[key]
    assert keys[-1] in inner
    inner[keys[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match=r"manifest\.json is damaged"):
        LLM(folder, "cpu")


def test_a_floor_that_lets_everything_pass(bundle: Path, tmp_path: Path) -> None:
    """It is no verdict, in words and exit code."""
    wide = {"floor": 1e30, "token_floor": 1e30}
    changed = with_facts(bundle, tmp_path / "c.safetensors", lambda facts: facts.update(wide))
    shown = ingot("repro", "--run", changed, "--device", "cpu")
    assert shown.exit_code == 2
    assert "none: the file's floor of 1e+30 lets any output pass" in shown.stdout
    reported = json.loads(ingot("repro", "--run", changed, "--device", "cpu", "--json").stdout)
    assert (reported["agrees"], reported["proves"]) == (True, False)


@pytest.mark.parametrize(
    "field", ["model.rope.theta", "model.rope.dim", "model.head_dim", "build.max_seq_len"]
)
@pytest.mark.parametrize("value", ["x", None, [], 10**12, 0, -5, 2**40, float("nan")], ids=repr)
def test_configs_of_a_bundle(bundle: Path, tmp_path: Path, field: str, value: object) -> None:
    """No memory is taken by what the file says of itself alone, and no number is a traceback."""
    *path, name = field.split(".")

    def change(facts: dict[str, Any]) -> None:
        for part in path:
            facts = facts[part]
        facts[name] = value

    changed = with_facts(bundle, tmp_path / "c.safetensors", change)
    try:
        found = replay(read_bundle(changed), torch.device("cpu"))
    except IngotError:
        pass
    else:
        assert field == "model.rope.theta", "this value cannot be"
        assert found.agrees is (found.against_expected <= found.floor)


# --- what reaches a terminal -----------------------------------------------------------------------------

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202egnp"


def test_errors_show_escape_codes_as_text() -> None:
    for error in (RequestError(EVIL), ConfigError("x", seen=[EVIL], allowed=EVIL, fix=EVIL)):
        reported = str(error)
        assert "\\x1b[2J" in reported or "\\\\x1b[2J" in reported
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", reported)
    assert "line\n\tbreak" in str(RequestError("line\n\tbreak"))
    assert len(str(RequestError("x", seen="y" * 10**6))) < 5000


def test_a_bundle_cannot_steer_the_terminal(bundle: Path, tmp_path: Path) -> None:
    words = {"engine": EVIL, "platform": EVIL, "expected_from": EVIL, "ingot_version": EVIL}
    changed = with_facts(bundle, tmp_path / "c.safetensors", lambda facts: facts.update(words))
    shown = ingot("repro", "--run", changed, "--device", "cpu")
    assert shown.exit_code == 0
    assert "\\x1b[2J" in shown.stdout
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown.output)
    reported = ingot("repro", "--run", changed, "--device", "cpu", "--json").stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", reported)
    assert json.loads(reported)["bundle"]["engine"] == EVIL


def test_names_in_files_cannot_steer_the_terminal(checkpoint: Path, engine: Path, tmp_path: Path) -> None:
    """A verb's error, a table and a warning; names of tensors, of layers and of fields."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    tensors = load_file(copy / "model.safetensors")
    save_file(
        {**tensors, EVIL.replace("\x00", ""): torch.zeros(1)}, copy / "model.safetensors", {"format": "pt"}
    )
    assert "\\x1b[2J" in refused("build", copy, "-o", tmp_path / "e", "--device", "cpu")
    other = Path(shutil.copytree(engine, tmp_path / "engine"))
    write(other / "plan.json", json.dumps({"tiles": {EVIL: {}}}))
    refused("inspect", other) if ingot("inspect", other).exit_code else None
    shown = ingot("diff", engine, other)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown.output)


def on_a_terminal(code: str, *arguments: object) -> str:
    """What a process writes whose stdout and stderr are a terminal."""
    own, other = pty.openpty()
    words = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(words, stdin=other, stdout=other, stderr=other, cwd=ROOT)
    os.close(other)
    text = b""
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while piece := os.read(own, 4096):
            text += piece
    os.close(own)
    process.wait()
    return text.decode()


def test_on_a_terminal_only_our_colours_are_codes(engine: Path, tmp_path: Path) -> None:
    """A file that the manifest does not name is reported by its name, whatever that is."""
    other = Path(shutil.copytree(engine, tmp_path / "engine"))
    (other / EVIL.replace("/", "")).touch()
    code = f"{MAY_FORK}\nimport sys; from ingot.cli.main import app; app(sys.argv[1:])"
    reported = on_a_terminal(code, "run", other, "a", "--device", "cpu", "--max-new-tokens", "1")
    assert "\\x1b[2J" in reported, reported
    assert "\x1b[2J" not in reported
    assert "\x1b]0" not in reported


def test_a_line_of_progress_is_overwritten() -> None:
    code = (
        "from ingot.cli.terminal.step_list import steps_shown\n"
        "with steps_shown() as show: show('first \\x1b[2J', 0, 2); show('second', 1, 2)"
    )
    reported = on_a_terminal(code)
    assert re.search(r"\r[^\r]*first \\x1b\[2J \(1/2\)[^\r]*\r[^\r]*second \(2/2\)[^\r]*\r +\r", reported), (
        repr(reported)
    )
