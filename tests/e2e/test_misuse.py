"""Impossible command lines: the message, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.terminal import ingot
from tests.quant.packed_checkpoints import Packing, write_packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ checkpoint."""
    return write_packed(tmp_path_factory.mktemp("packed") / "checkpoint", Packing("gptq")).folder


def refused(*words: object) -> str:
    result = ingot(*words, stdin="")
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    return str(result.stderr)


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        ({"role": "robot", "content": "Hi"}, "fix: messages[0].role"),
        ({"role": "user", "content": 7}, "fix: messages[0].content"),
        ({"role": "user"}, "fix: messages[0].content"),
        ({"role": "assistant", "content": "Hi"}, "the first message"),
    ],
)
def test_messages_that_are_none(
    tiny_engine: Path, tmp_path: Path, message: dict[str, object], reported: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [message]}) + "\n")
    assert reported in refused("run", tiny_engine, "--file", rows, "--device", "cpu")
    whole = tmp_path / "messages.json"
    whole.write_text(json.dumps([message]))
    assert reported in refused("explain", tiny_engine, "--messages", whole)


def test_repro_writes_over_no_file(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = tmp_path / f"{tiny_engine.name}-layer0.safetensors"
    for path, words in ((usual, ()), (tmp_path / "mine", ("--out", tmp_path / "mine"))):
        path.write_text("mine")
        reported = refused("repro", tiny_engine, "--layer", 0, "--ids", "1 2", "--device", "cpu", *words)
        assert "error: the file exists" in reported
        assert "fix: --out, with another name" in reported
        assert path.read_text() == "mine"


def test_plan_refuses_what_build_refuses(packed: Path, tiny: Path, tmp_path: Path) -> None:
    layers = tmp_path / "mixed.yaml"
    layers.write_text("scheme: w8a16\nlayers: {layers.99.*: none}\n")
    for checkpoint, quant in ((packed, "w8a16"), (packed, "w4a16"), (tiny, layers)):
        planned = refused("plan", checkpoint, "--gpu", "80GiB", "--quant", quant)
        built = refused("build", checkpoint, "-o", tmp_path / "new", "--device", "cpu", "--quant", quant)
        assert planned == built
        assert planned.startswith("error: ")


def test_plan_takes_what_build_takes_of_a_quantized_checkpoint(packed: Path, tmp_path: Path) -> None:
    same = tmp_path / "same.yaml"
    same.write_text("{scheme: w4a16, group: 32, symmetric: true, source: gptq}\n")
    for quant in ("none", same):
        result = ingot("plan", packed, "--gpu", "80GiB", "--quant", quant)
        assert result.exit_code == 0, result.stderr
        assert ", w4a16" in result.stdout.splitlines()[0]


def test_where_without_a_match_names_what_there_is(tiny_engine: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b", "lang": lang, "n": i} for i, lang in enumerate(["de", "en"] * 4)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("eval", "answers", tiny_engine, "--data", data, "--device", "cpu")
    reported = refused(*words, "--where", "lang=fr")
    assert f"no record of {data} has lang=fr\n  seen: lang: de, en\n  fix: --where\n" in reported
    reported = refused(*words, "--where", "n=9", "--where", "lang=de")
    assert "has n=9 and lang=de" in reported
    assert "seen: n: 0, 1, 2, 3, 4 and 3 more; lang: de, en" in reported
    assert "no record has langs; fields: prompt, answer, lang, n" in refused(*words, "--where", "langs=de")


def test_inspect_says_that_it_reads_no_weights(tiny_engine: Path) -> None:
    shown = ingot("inspect", tiny_engine).stdout
    assert "the weights were not read: `ingot verify` checks them" in shown
