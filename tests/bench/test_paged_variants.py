"""The script that chooses between variants of decode attention: its checks can fail, its choice follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="checked with the interpreter's kernels")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import paged_variants

    return paged_variants


def test_a_wrong_variant_is_found(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = module.Checked(module.Family(2, 1, 16), "cpu", (70, 0, 65))
    good, right = module.Variant("stream", (("MIN_SPLIT", 32), ("BLOCK_N", 32))), module.OPS["stream"]

    def fault_of(op: Any) -> str:
        monkeypatch.setitem(module.OPS, "stream", op)
        return checked.fault(good, (1,))

    def forgets(q: torch.Tensor, *rest: Any, out: torch.Tensor, **named: Any) -> torch.Tensor:
        kept = out[-1].clone()
        right(q, *rest, out=out, **named)
        out[-1] = kept
        return out

    def follows_the_batch(q: torch.Tensor, *rest: Any, out: torch.Tensor, **named: Any) -> torch.Tensor:
        return right(q, *rest, out=out, **named).mul_(1 if len(q) > 1 else 1.0009765625)

    def follows_run(q: torch.Tensor, *rest: Any, tiles: dict[str, int], **named: Any) -> torch.Tensor:
        return right(q, *rest, tiles=tiles, **named).mul_(1 if tiles["RUN"] > 1 else 1.0009765625)

    assert fault_of(right) == ""
    assert "error" in fault_of(forgets)
    assert fault_of(follows_the_batch) == "other bits alone"
    assert "other bits with" in fault_of(follows_run)
    assert fault_of(lambda *args, **named: 1 / 0).startswith("ZeroDivisionError")


def test_the_choice_is_near_the_best_everywhere(module: Any) -> None:
    def row(batch: int, **us: float) -> dict[str, Any]:
        entries = [{"name": name, "us": value, "free": {"RUN": batch}} for name, value in us.items()]
        entries.sort(key=lambda entry: entry["us"])
        return {"batch": batch, "context": 640, "ragged": False, "variants": entries, "default_us": 9.0}

    found = module.recommended(module.Family(2, 2, 16), [row(1, a=10, b=11, c=30), row(8, a=40, b=22, c=20)])
    assert [score["tiles"] for score in found] == ["b", "a", "c"]
    assert found[0]["over_best"] == 1.1
    assert found[0]["shapes"]["8x640"] == {"us": 22, "default_us": 9.0, "sdpa_us": None, "RUN": 8}


def test_runs_leave_enough_programs_and_spans(module: Any) -> None:
    stream = module.Variant("stream")

    def runs(batch: int, context: int) -> list[int]:
        shape = module.Shape(32, 8, 128, batch, context)
        return [free["RUN"] for free in module.frees_of(stream, shape, 2)]

    assert runs(1, 640) == [1]
    assert runs(32, 2048) == [1, 2, 4, 8]
    assert runs(64, 576) == [1, 2, 4, 8]
    assert list(module.frees_of(module.Variant("now"), module.Shape(2, 2, 16, 1, 64), 4)) == [{"OVERLAP": 4}]


@pytest.mark.slow
def test_a_dry_run_reaches_every_shape(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "paged_attention.py"), "--variants", "--dry", "--seconds", "400"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPTS.parent)}
    path = tmp_path / "variants.json"
    done = subprocess.run(
        [*command, "--json", str(path)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["wrong"] == {}
    assert found["not_reached"] == []
    assert len(found["rows"]) == 3
    assert set(found["recommended"]) == {"q2_kv2_d16", "q4_kv1_d16"}
