"""Perplexity is told with its window, and one that nobody chose is the same alone and beside another side."""

from __future__ import annotations

import json
from pathlib import Path

from ingot import build
from ingot.cli.metric_text import metric_line
from ingot.engine.proof import Metric
from ingot.evaluate.data import read_data
from ingot.evaluate.perplexity import DEFAULT_WINDOW, Reading, prepare
from ingot.evaluate.side import SideSpec
from tests.e2e.terminal import ingot
from tests.tiny_models import random_ids, save_model, tiny_config


def test_a_window_that_nobody_chose_is_the_same_alone_and_beside_huggingface(tmp_path: Path) -> None:
    pocket = Path(__file__).parents[2] / "models" / "pocket-chat"  # trained on 1024, reads 8192
    engine = build(pocket, tmp_path / "engine", device="cpu", proof=False)
    text = tmp_path / "a.txt"
    text.write_text("A fire broke out in a bakery. " * 9)
    alone, other = SideSpec(str(engine), device="cpu"), SideSpec(str(pocket), kind="hf", device="cpu")
    for specs in ([alone], [alone, other], [alone.replace(path=str(pocket))]):
        found = prepare(specs, read_data(text), Reading(), DEFAULT_WINDOW)[0]
        assert (found.window, found.stride) == (1024, 512)


def test_perplexity_is_told_with_its_window(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path / "llama", seed=1)
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"token_ids": random_ids(60)}))
    words = ("--data", path, "--window", 48, "--stride", 16, "--device", "cpu")
    shown = ingot("eval", "perplexity", tmp_path / "llama", *words).stdout
    assert "perplexity, window 48, stride 16\n" in shown


def test_a_metric_of_a_proof_names_its_window() -> None:
    metric = Metric("perplexity", 7.5, None, "lower", "wiki.jsonl", "00", window=(1024, 512))
    assert metric_line(metric)[1] == "perplexity 7.5 on wiki.jsonl with window 1024, stride 512"
    assert Metric.from_json(metric.to_json()) == metric
