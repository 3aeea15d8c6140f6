"""``align``, from the first bad stage to its cause: each kind of bug planted in an engine is named first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ingot.align import session
from ingot.align.session import align
from tests.align.planted import BUGS, plant
from tests.align.planted_on_disk import ON_DISK, plant_on_disk
from tests.tiny_models import random_ids, save_model, tiny_config

IDS = random_ids(24, seed=5)
# Of each of the ten kinds; test_culprits.py has them all, at the stage alone.
IN_MEMORY = [
    "rope_twice",
    "rope_style",
    "positions_shifted",
    "gate_up_swapped",
    "activation_branch",
    "norm_kind",
    "norm_post",
    "norm_parallel",
    "mask_missing",
    "window_off_by_one",
    "residual_missing",
    "residual_scale",
    "qkv_bias_missing",
    "o_bias_doubled",
    "o_transposed",
    "head_order_groups",
    "attention_scale_missing",
    "head_untied",
]


def checkpoint(folder: Path, kind: str, changes: tuple[tuple[str, Any], ...] = ()) -> Path:
    save_model(tiny_config(kind, **dict(changes)), folder, seed=3)
    return folder


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
