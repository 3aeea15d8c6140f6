"""The measurement of the headline table runs for every scheme, and its processes join into one table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import headline
from benchmarks.fewer_bits import SCHEMES, commands, main
from benchmarks.headline_table import joined

ROOT = Path(__file__).resolve().parents[3]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """The 7B's config.json with two narrow layers and few ids."""
    config = json.loads(headline.SHAPE.read_text(encoding="utf-8"))
    file = tmp_path / "tiny.json"
    file.write_text(
        json.dumps(config | SHAPE | {"num_hidden_layers": 2, "vocab_size": 320}), encoding="utf-8"
    )
    return file


def measured(shape: Path, scheme: str, **given: Any) -> dict[str, Any]:
    wanted = {"device": "cpu", "kv_dtype": "auto", "parts": list(headline.PARTS), "repeats": 2, "small": True}
    return headline.measured(argparse.Namespace(**{**wanted, "scheme": scheme, **given}), shape)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headline, "BATCHES", (1, 3))
    monkeypatch.setattr(headline, "REQUESTS", 5)


@pytest.mark.slow
@pytest.mark.stays("w4a16", "rptq-w8a8")
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_every_figure(shape: Path, tmp_path: Path, scheme: str) -> None:
    record = measured(shape, scheme)
    assert record["facts"]["quantization"].startswith(scheme)
    folder = tmp_path / "headline"
    folder.mkdir()
    for place, parts in enumerate((record, {**record, "mixed": None}), start=1):
        kept = {name: value for name, value in parts.items() if value is not None}
        (folder / f"{scheme}.{place}.json").write_text(json.dumps(kept), encoding="utf-8")
    table = joined(folder)
    found = table["schemes"][scheme]
    assert table["commits"] == [record["machine"]["commit"]]
    assert table["read_gb_s"]["least"] > 0
    assert found["rounds"] == 2
    for batch in ("1", "3"):
        reported = found["decode"][batch]
        assert reported["runs"] == 4
        assert reported["least"] <= reported["p50"] <= reported["p90"] <= reported["most"]
        assert reported["floor"] > 0
        assert found["ttft"][batch]["p50"] > 0
    assert len(found["prefill"]["medians"]) == 2
    assert found["mixed"]["runs"] == 2
    assert found["mixed"]["least"] - 1 < record["mixed"]["output_tokens_per_s"] < found["mixed"]["most"] + 1


@pytest.mark.usefixtures("few")
def test_a_cache_in_8_bits_answers_the_mixed_load(shape: Path) -> None:
    record = measured(shape, "w8a8", kv_dtype="int8", parts=["mixed"], repeats=1)
    assert record["facts"]["runtime"]["kv_dtype"] == "int8"
    assert record["mixed"]["new_tokens"] == 5 * headline.FEW_NEW
    assert "latency" not in record


def test_rounds_are_pooled(tmp_path: Path) -> None:
    def record(all_new: list[float], gpu: str = "one") -> str:
        runs = {"one_new": [0.1, 0.1], "all_new": all_new}
        entry = {"batch": 64, "new_tokens": 101, "floor_ms": 4.0, "seconds_of_runs": runs}
        machine = {"gpu": gpu, "commit": "abc", "torch": "2"}
        reported = {"machine": machine, "ceiling": {"read_gb_s": 4000.0}, "command": "x", "latency": [entry]}
        return json.dumps(reported)

    (tmp_path / "w8a8.1.json").write_text(record([0.94, 0.95]), encoding="utf-8")
    (tmp_path / "w8a8.2.json").write_text(record([1.145, 0.949]), encoding="utf-8")
    decode = joined(tmp_path)["schemes"]["w8a8"]["decode"]["64"]
    assert (decode["least"], decode["p50"], decode["most"]) == pytest.approx((8.4, 8.495, 10.45))
    assert decode["medians"] == pytest.approx([8.45, 9.47])
    (tmp_path / "none.1.json").write_text(record([1.0, 1.0], gpu="other"), encoding="utf-8")
    with pytest.raises(ValueError, match="one machine"):
        joined(tmp_path)


def test_the_first_round_has_everything() -> None:
    first, second = (dict(commands([place])) for place in (1, 2))
    assert {f"headline/{scheme}.1" for scheme in SCHEMES} | {"headline/w8a8_int8.1"} <= first.keys()
    assert all("latency" in second[f"headline/{scheme}.2"] for scheme in SCHEMES)


@pytest.mark.slow
def test_the_run_of_all_writes_a_file_a_process(shape: Path, tmp_path: Path) -> None:
    """As it is run on a GPU, of one scheme's second round."""
    script = [sys.executable, "benchmarks/fewer_bits.py", "--json", str(tmp_path)]
    engine = f"--engine --shape {shape} --device cpu --small --threads 1 --repeats 1".split()
    run = [*script, "headline/none", "--rounds", "2", *engine]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = joined(tmp_path / "headline")
    assert table["schemes"]["none"]["rounds"] == 1


def test_a_figure_that_is_none_is_misuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fewer_bits.py", "--json", str(tmp_path), "headline/w9"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
