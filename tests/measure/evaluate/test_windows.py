"""Windows of perplexity: how they are told, which nobody chose, and the bytes of the tokens that count."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot import build
from ingot.cli.terminal.metric_text import metric_line
from ingot.engine.proof_file import Metric
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.perplexity import DEFAULT_WINDOW, WindowSettings, prepare
from ingot.measure.side.side_spec import SideSpec
from tests.e2e.terminal import ingot
from tests.measure.evaluate.conftest import write, write_ids
from tests.measure.evaluate.test_eval import record
from tests.tiny_models import random_ids

TEXTS = ("A text of bytes, é and 漢字 among them, long enough for windows.", "b", "Another.")


def test_a_window_that_nobody_chose_is_the_same_alone_and_beside_huggingface(tmp_path: Path) -> None:
    pocket = Path(__file__).parents[3] / "models" / "pocket-chat"  # trained on 1024, reads 8192
    engine = build(pocket, tmp_path / "engine", device="cpu", proof=False)
    text = tmp_path / "a.txt"
    text.write_text("A fire broke out in a bakery. " * 9)
    alone, other = SideSpec(str(engine), device="cpu"), SideSpec(str(pocket), kind="hf", device="cpu")
    for specs in ([alone], [alone, other], [alone.replace(path=str(pocket))]):
        found = prepare(specs, read_data(text), WindowSettings(), DEFAULT_WINDOW)[0]
        assert (found.window, found.stride) == (1024, 512)


def test_perplexity_is_reported_with_its_window(llama: Path, tmp_path: Path) -> None:
    path = write_ids(tmp_path / "ids.jsonl", random_ids(60))
    words = ("--data", path, "--window", 48, "--stride", 16, "--device", "cpu")
    shown = ingot("eval", "perplexity", llama, *words).stdout
    assert "perplexity, window 48, stride 16\n" in shown


def test_a_metric_of_a_proof_names_its_window() -> None:
    metric = Metric("perplexity", 7.5, None, "lower", "wiki.jsonl", "00", window=(1024, 512))
    assert metric_line(metric)[1] == "perplexity 7.5 on wiki.jsonl with window 1024, stride 512"
    assert Metric.from_json(metric.to_json()) == metric


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 16), (64, 1)])
def test_with_a_token_a_byte_both_are_as_many(
    chatter: Path, window: int, stride: int, tmp_path: Path
) -> None:
    data = write(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))
    counts = record("perplexity", chatter, "--data", data, "--window", window, "--stride", stride)["counts"]
    assert counts["tokens"] == sum(len(text.encode()) for text in TEXTS if len(text) > 1)
    assert 0 < counts["counted_bytes"] == counts["counted_tokens"] < counts["tokens"]
