"""The table of small cards is what the ledger says today, and the 14B shape has the published size."""

from __future__ import annotations

import json

import pytest

from benchmarks.result_values import RESULTS
from benchmarks.small_cards import CARDS_GIB, SETTINGS, SHAPES, row
from tests.e2e.terminal import ingot

RECORD = json.loads((RESULTS / "small_cards.json").read_text(encoding="utf-8"))
PUBLISHED = 14_770_033_664  # parameters of Qwen2.5-14B


@pytest.mark.parametrize("name", ["16 bits", "w4a16", "w4a16, head in 8 bits"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_table_is_what_the_ledger_says(shape: str, name: str) -> None:
    (stored,) = (one for one in RECORD["rows"] if (one["shape"], one["setting"]) == (shape, name))
    assert stored == row(shape, name), (
        "run python benchmarks/small_cards.py --json docs/results/small_cards.json"
    )


def test_every_setting_is_in_the_table() -> None:
    assert [(one["shape"], one["setting"]) for one in RECORD["rows"]] == [
        (s, n) for s in SHAPES for n in SETTINGS
    ]


def test_the_14b_has_the_published_parameters() -> None:
    (found,) = (one for one in RECORD["rows"] if (one["shape"], one["setting"]) == ("14B", "16 bits"))
    rotary = 1024 * 64 * 2 * 4  # cosines and sines of 1,024 positions in fp32
    assert found["kinds"]["weights"] == 2 * PUBLISHED + rotary
    assert found["kinds"]["KV cache"] == 1024 * 48 * 2 * 8 * 128 * 2


@pytest.mark.slow
@pytest.mark.parametrize("gib", CARDS_GIB)
def test_plan_agrees_with_the_table(gib: int) -> None:
    words = ("--quant", "w4a16", "--max-batch-size", 1, "--max-seq-len", 1024, "--gpu", f"{gib}GiB", "--json")
    for shape, config in SHAPES.items():
        (stored,) = (one for one in RECORD["rows"] if (one["shape"], one["setting"]) == (shape, "w4a16"))
        (card,) = (one for one in stored["cards"] if one["gib"] == gib)
        shown = ingot("plan", config, *words)
        found = json.loads(shown.stdout)
        assert shown.exit_code == (0 if card["fits"] else 1)
        assert found["needed_bytes"] == stored["needed"]
        assert found["usable_bytes"] == card["usable"] == int(0.9 * (gib << 30))
        assert (found["needed_bytes"] <= found["usable_bytes"]) == card["fits"]
