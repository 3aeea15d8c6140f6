"""``align``, from the first bad stage to its cause: each kind of bug planted in an engine is named first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ingot import build
from ingot.measure.align import align_session as session
from ingot.measure.align.align_session import align
from tests.e2e.terminal import ingot
from tests.measure.align.planted import BUGS, plant
from tests.measure.align.planted_on_disk import ON_DISK, plant_on_disk
from tests.measure.align.spoken import BEGIN, END, edit, write_spoken
from tests.tiny_models import random_ids, save_model, tiny_config

IDS = random_ids(24, seed=5)
# The ten kinds of bug, each with those planted here from one end to the other; test_diagnosis.py has them
# all, at the stage alone.
TEN = {
    "RoPE twice, of another base or style": ("rope_twice", "rope_base", "rope_scaling", "rope_style"),
    "gate and up swapped": ("gate_up_swapped",),
    "activation": ("activation", "activation_branch"),
    "norm epsilon or placement": (
        *("norm_eps", "norm_eps_layer", "norm_offset"),
        *("norm_kind", "norm_post", "norm_parallel"),
    ),
    "mask": ("mask_missing", "window", "window_off_by_one"),
    "residual scale": ("residual_scale", "residual_missing"),
    "bias": ("qkv_bias_missing", "o_bias_missing", "o_bias_doubled", "mlp_bias_doubled"),
    "weights transposed": ("o_transposed",),
    "head order": ("head_order_groups",),
    "stop ids": ("stop_ids",),
}
OTHERS = ("positions_shifted", "attention_scale_missing", "head_untied")
ALL = [name for names in (*TEN.values(), OTHERS) for name in names]
FIRST = {next((name for name in names if name in BUGS), "") for names in TEN.values()} | {*OTHERS}
IN_MEMORY = [  # one of each kind; test_diagnosis.py plants all
    pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in ALL if name in BUGS
]
STOPS = {"missing": [], "another": [7], "one too many": [7, END], "the begin of text": [BEGIN]}


def checkpoint(folder: Path, kind: str, changes: tuple[tuple[str, Any], ...] = ()) -> Path:
    save_model(tiny_config(kind, **dict(changes)), folder, seed=3)
    return folder


def test_every_kind_is_planted() -> None:
    assert {*ALL} == {*(case.values[0] for case in IN_MEMORY), *ON_DISK, "stop_ids"}


@pytest.mark.stays("rope_twice", "activation", "mask_missing", "o_transposed", "positions_shifted")
@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_bug_in_the_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    folder = checkpoint(tmp_path / "original", bug.kinds[0], bug.config)

    class Broken(session.LLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            plant(self, name)

    monkeypatch.setattr(session, "LLM", Broken)
    report = align(folder, folder, [IDS], steps=1, device="cpu", original="hf")
    assert not report.aligned
    assert report.findings, report.first_stage
    assert report.findings[0].culprit == bug.culprit, [found.text for found in report.findings]


@pytest.mark.stays("rope_base", "norm_eps_layer", "window", "mlp_bias_doubled", "head_untied")
@pytest.mark.parametrize("name", ON_DISK)
def test_a_bug_in_what_was_built(name: str, tmp_path: Path) -> None:
    culprit, _, kinds = ON_DISK[name]
    changes = (("tie_word_embeddings", True),) if name == "head_untied" else ()
    folder = checkpoint(tmp_path / "original", kinds[0], changes)
    built = Path(shutil.copytree(folder, tmp_path / "built"))
    plant_on_disk(built, name)
    report = align(built, folder, [IDS], steps=1, device="cpu", original="hf")
    assert not report.aligned
    assert report.findings[0].culprit == culprit, [found.text for found in report.findings]


@pytest.mark.stays("missing", "one too many")
@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_stop_ids(stops: list[int], tmp_path: Path) -> None:
    folder = write_spoken(tmp_path / "original")
    engine = build(folder, tmp_path / "engine", device="cpu", max_batch_size=2, proof=False)
    edit(engine / "manifest.json", stop_ids=stops)
    result = ingot("align", engine, "--reference", folder, "--steps", "1", "--device", "cpu", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["first_stage"], found["first"]) == ("stop ids", None)
    assert [finding["culprit"] for finding in found["findings"]] == ["stop_ids"]
