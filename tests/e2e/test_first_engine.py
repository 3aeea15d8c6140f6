"""docs/first-engine.md: every command runs as it stands, with a tiny GPT-2 where the checkpoint is."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.figures import ROOT
from ingot.measure.bench.ceiling import Ceiling
from tests.e2e.terminal import ingot
from tests.tiny_models import save_model, tiny_config

PAGE = (ROOT / "docs" / "first-engine.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]
(ARTICLES,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
BUILD, *OTHERS = LINES
THRESHOLD = next(line for line in OTHERS if "--min" in line)
# What each shows when it ends well, and its exit code; random weights do not summarize.
ENDS = {
    "run": ("tokens in", 0),
    "inspect": ("gpt2", 0),
    "eval": ("every difference is within its limit", 0),
    "align": ("aligned", 0),
    "verify": ("proven engines/gpt2", 0),
    "bench": ("decode ms", 0),
}


def run(line: str) -> tuple[str, int]:
    """What a line of the page prints, and its exit code."""
    done = ingot(*shlex.split(line)[1:])
    return done.stdout + done.stderr, done.exit_code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder: a checkpoint by the page's name in GPT-2's layout, the articles, and the engine."""
    place = tmp_path_factory.mktemp("first")
    checkpoint = place / BUILD.split()[2]
    letters = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    ids = {"vocab_size": len(letters), "bos_token_id": 256, "eos_token_id": 256}
    save_model(tiny_config("gpt2", n_positions=1024, **ids), checkpoint, seed=3)
    (checkpoint / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (checkpoint / "merges.txt").write_text("#version: 0.2\n")
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (place / "articles.jsonl").write_text(ARTICLES, encoding="utf-8")
    ceiling = Ceiling(read_gb_s=10.0, matmul_tflop_s=1.0, dtype="fp32", read_bytes=1, matmul_size=1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(place)
        monkeypatch.setattr("ingot.measure.bench.bench_session.measure_ceiling", lambda *_: ceiling)
        shown, code = run(f"{BUILD} --device cpu")
        assert code == 0, shown
        yield place


@pytest.mark.parametrize("line", [line for line in OTHERS if line != THRESHOLD], ids=lambda one: one[:30])
def test_every_line_ends_well(folder: Path, line: str) -> None:
    words, code = ENDS[line.split()[1]]
    shown, ended = run(line)
    assert (words in shown, ended) == (True, code), shown
    if line.startswith("ingot bench"):
        machine = json.loads((folder / "bench.json").read_text())["machine"]
        assert {"ram_gb", "os", "numa_nodes", "commit"} <= machine.keys()  # as the page says


def test_the_threshold_decides(folder: Path) -> None:
    """1 below the page's; 0 where it is what nonsense reaches."""
    shown, code = run(THRESHOLD)
    assert ("not good enough: rouge1" in shown, code) == (True, 1), shown
    shown, code = run(THRESHOLD.replace("rouge1=14", "rouge1=0"))
    assert code == 0, shown


def test_the_page_has_all_steps() -> None:
    assert [line.split()[1] for line in LINES] == [
        *("build", "run", "inspect", "eval", "eval", "align", "verify", "bench")
    ]
    assert all(line.startswith("ingot ") for line in LINES)
