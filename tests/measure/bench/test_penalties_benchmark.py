"""The benchmark of penalties, biases and grammars runs on any machine; what it finds there says nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import penalties
from benchmarks.half_matcher import HalfMatcher
from tests.tiny_models import tiny_config


def test_every_case_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = tmp_path / "config.json", tmp_path / "record.json"
    config.write_text(json.dumps(tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    asked = 0
    mask_into = HalfMatcher.mask_into

    def counted(*args: object) -> None:
        nonlocal asked
        asked += 1
        mask_into(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(HalfMatcher, "mask_into", counted)
    words = ["penalties.py", config, "--device", "cpu", "--batch", "3", "--prompt-tokens", "4"]
    words += ["--new-tokens", "8", "--runs", "1", "--json", record]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as ended:
        penalties.main()
    result = json.loads(record.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert set(penalties.CASES) | {"one bias", "one grammar"} <= set(result["added"])
    assert asked == 2 * 8, "of one request in two runs, of the others none"
    beyond = any(result["added"][case] > limit for case, limit in result["limits"].items())
    assert ended.value.code == int(beyond)
