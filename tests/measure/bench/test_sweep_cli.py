"""``ingot sweep`` from the command line to its files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

from ingot.measure.bench.sweep.sweep_store import POINTS
from tests.e2e.terminal import ingot

SMALL = ("--prompt-tokens", 8, "--new-tokens", 4, "--repeats", 1, "--device", "cpu", "--threads", 1)


def test_from_the_command_line_to_the_files(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    result = ingot("sweep", checkpoint, "--dtype=fp32", "--batch=1,2", *SMALL, "--out", out, "--no-png")
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("fp32")]
    assert [row[:2] for row in rows] == [["fp32", "1"], ["fp32", "2"]]
    assert sorted(path.name for path in out.iterdir()) == [POINTS, "sweep.html", "sweep.json"]
    record = json.loads((out / "sweep.json").read_text())
    assert (record["schema"], record["verb"]) == (1, "sweep")
    for line in record["lines"]:
        assert [point["batch"] for point in line["points"]] == [1, 2]
        for point in line["points"]:
            assert point["figures"]["output_tokens_per_s"] > 0
            assert point["memory"]["weights_gb"] > 0
            assert "raw" not in point["figures"]
    page = (out / "sweep.html").read_text()
    assert page.count("<svg") == 1
    assert "<script" not in page
    shown = ingot("sweep", "--draw", "--out", out, "--no-png", "--json")
    assert json.loads(shown.stdout) == record
    (out / "sweep.json").write_text("of an earlier version")
    other = ("--new-tokens", 5, "--out", out, "--no-png")
    refused = ingot("sweep", checkpoint, "--dtype=fp32", "--batch=1,2", *SMALL, *other)
    assert "new_tokens 4, now 5" in refused.stderr
    assert (out / "sweep.json").read_text() == "of an earlier version"  # nothing was measured


def test_misuse_exits_with_2_and_says_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path, "--no-png", *SMALL)
    for words, message in (
        ((checkpoint, "--no-png"), "--out"),
        (out, "either CHECKPOINT or --random-weights"),
        ((checkpoint, "--random-weights", checkpoint, *out), "either CHECKPOINT or --random-weights"),
        ((checkpoint, "--batch", "1,x", *out), "batch sizes must be positive integers"),
        ((checkpoint, "--batch", "0", *out), "batch sizes must be positive integers"),
        ((checkpoint, *out, "--prompt-tokens", 128), "longer than the model's context"),
        ((checkpoint, "--dtype", "fp32,", *out), "expected names separated by commas"),
        ((checkpoint, "--quant", "w3", *out), "unknown quantization scheme"),
        ((checkpoint, "--limit", "3", *out), "--limit needs --data"),
        (("--random-weights", checkpoint, "--data", "x", *out), "random weights have no quality"),
        ((checkpoint, "--batch", "1", "--data", tmp_path / "absent.jsonl", *out), "--data"),
        ((checkpoint, "--against", "engines/x", *out), "hf, hf:CHECKPOINT"),
        ((tmp_path / "absent", *out), "neither an existing folder nor"),
        (("--draw", "--out", tmp_path, "--no-png"), "there are no measured points"),
    ):
        result = ingot("sweep", *words)
        assert result.exit_code == 2, words
        assert message in " ".join(result.stderr.replace("│", " ").split()), (words, result.stderr)
    assert not (tmp_path / POINTS).exists()
