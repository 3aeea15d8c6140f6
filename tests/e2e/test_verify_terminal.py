"""``ingot verify`` and what other verbs tell of a proof, in a terminal."""

from __future__ import annotations

import json
from pathlib import Path

from ingot import build
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny


class TestTerminal:
    def test_text_and_json(self, tmp_path: Path) -> None:
        write_tiny(tmp_path / "qwen")
        engine = build(tmp_path / "qwen", tmp_path / "engine", dtype="fp16", device="cpu")
        shown = ingot("verify", engine, "--device", "cpu")
        assert (shown.exit_code, shown.stdout.splitlines()[0].startswith("proven ")) == (0, True)
        assert "% of a row of logits" in shown.stdout
        told = json.loads(ingot("verify", engine, "--device", "cpu", "--json").stdout)
        assert (told["verdict"], told["failures"], told["dtype"]) == ("proven", [], "fp32")
        assert told["proven_by"]["dtype"] == "fp16"
        inspected = json.loads(ingot("inspect", engine, "--json").stdout)
        assert inspected["proof"]["cases"]["long"] == [200, 16]
        assert inspected["doubt"] is None
        assert "golden cases" in ingot("inspect", engine).stdout
        assert ingot("diff", engine, engine).exit_code == 0

    def test_no_engine_is_misuse(self, tmp_path: Path) -> None:
        assert ingot("verify", tmp_path / "none").exit_code == 2
        assert ingot("verify", tmp_path).exit_code == 2

    def test_a_build_without_proof(self, checkpoint: Path, tmp_path: Path) -> None:
        target = tmp_path / "engine"
        assert ingot("build", checkpoint, "-o", target, "--device", "cpu", "--no-proof").exit_code == 0
        assert sorted(p.name for p in target.iterdir()) == [
            "manifest.json",
            "plan.json",
            "weights.safetensors",
        ]
