"""align walks pixels, ViT, Q-Former, projector and LLaMA; a fault is named where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot import LLM, build
from ingot.engine.engine_loader import Engine
from ingot.image.image_reader import Picture
from ingot.measure.align.align_session import Report, align
from tests.vision.files import LLAMA2, TINY, Tiny, write_files
from tests.vision.misplaced import misplace_pictures
from tests.vision.test_proof import FAULTS, PREPARED, _pixels_of

VIT, QFORMER = "encoder.vit", "encoder.qformer"
IDS = [[5, 7, 9, 11]]
STAGES = {
    "patch bias dropped": f"{VIT}.patch_embedding",
    "positions of other patches": f"{VIT}.embedding",
    "eps 1e-5 for 1e-6": f"{VIT}.layers.0.input_norm",
    "tanh-GELU": f"{VIT}.layers.0.mlp",
    "ln_vision twice": "encoder.ln_vision",
    "one query missing": f"{QFORMER}.embedding",
    "queries' norm": f"{QFORMER}.layers.1.post_norm",
    "values for keys": f"{QFORMER}.layers.2.cross_keys",
    "cross queries": f"{QFORMER}.layers.0.cross_attention",
    "the text's feed-forward": f"{QFORMER}.layers.1.mlp",
    "last norm": f"{QFORMER}.layers.2.output",
    "projector": "encoder.projector",
    "embeddings of text": "embedding",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    found = write_files(folder, TINY)
    return found, build(found.file, folder / "engine", device="cpu", dtype="fp32", proof=False)


def _report(tiny: tuple[Tiny, Path], steps: int = 1) -> Report:
    return align(tiny[1], tiny[0].file, IDS, steps=steps, device="cpu")


def test_every_stage_of_a_sound_engine_is_within_its_limit(tiny: tuple[Tiny, Path]) -> None:
    report = _report(tiny, steps=2)
    assert report.aligned, report.first_stage
    assert report.reference == "Ingot's checking decoder, fp32"
    stages = [row.stage for row in report.rows if row.step == 0]
    assert stages[:3] == ["pixels", f"{VIT}.patch_embedding", f"{VIT}.embedding"]
    wanted = (
        "attention",
        "residual",
        "cross_keys",
        "cross_values",
        "cross_attention",
        "cross_residual",
        "post_norm",
    )
    assert {f"{QFORMER}.layers.0.{kind}" for kind in (*wanted, "mlp", "mlp_residual", "output")} < set(stages)
    assert f"{QFORMER}.layers.1.cross_norm" not in stages
    assert stages.index("encoder.projector") < stages.index("embedding") < stages.index("layers.0.attention")
    alone = {row.stage for row in report.rows if row.step == 0 and row.alone is not None}
    assert alone >= {stage for stage in stages if stage.startswith("encoder.")}
    assert "embedding" in alone
    assert report.tensors is not None
    assert not report.tensors.differences


def test_the_variant_without_queries(tmp_path: Path) -> None:
    found = write_files(tmp_path, LLAMA2)
    engine = build(found.file, tmp_path / "engine", device="cpu", dtype="fp32", proof=False)
    report = align(engine, found.file, IDS, steps=1, device="cpu")
    assert report.aligned, report.first_stage
    assert not any(row.stage.startswith(QFORMER) for row in report.rows)


@pytest.mark.stays("w8a8")
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_in_fewer_bits(scheme: str, tiny: tuple[Tiny, Path], tmp_path: Path) -> None:
    engine = build(tiny[0].file, tmp_path / "engine", device="cpu", quant=scheme, proof=False)
    report = align(engine, tiny[0].file, IDS, steps=1, device="cpu")
    assert report.aligned, report.first_stage
    assert report.quant is not None


def _planted(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Engine], None]) -> None:
    def opened(*args: Any, **options: Any) -> LLM:
        llm = LLM(*args, **options)
        plant(llm.engine)
        return llm

    monkeypatch.setattr("ingot.measure.align.align_session.LLM", opened)


@pytest.mark.stays(
    "patch bias dropped", "tanh-GELU", "one query missing", "values for keys", "the text's feed-forward"
)
@pytest.mark.parametrize("fault", STAGES)
def test_a_fault_is_named_where_it_is(
    fault: str, tiny: tuple[Tiny, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _planted(monkeypatch, FAULTS[fault][0])
    report = _report(tiny, steps=0)
    assert not report.aligned
    assert report.first is not None
    assert (report.first.row.stage, report.first.alone) == (STAGES[fault], True)


@pytest.mark.stays("BGR")
@pytest.mark.parametrize("fault", ["BGR", "ImageNet's deviation"])
def test_wrong_pixels_are_named(fault: str, tiny: tuple[Tiny, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    change = PREPARED[fault]
    monkeypatch.setattr(Picture, "pixels", lambda picture, features: _pixels_of(picture, features, change))
    assert _report(tiny, steps=0).first_stage == "pixels"


def test_a_picture_one_token_off_is_named(tiny: tuple[Tiny, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    misplace_pictures(monkeypatch, lambda slots: np.roll(slots, 1))
    report = _report(tiny, steps=0)
    assert report.first is not None
    assert (report.first.row.stage, report.first.alone) == ("embedding", False)


def test_a_prompt_with_the_id_of_pictures_is_refused(tiny: tuple[Tiny, Path]) -> None:
    with pytest.raises(Exception, match="id that stands for pictures"):
        align(tiny[1], tiny[0].file, [[5, 0, 7]], steps=0, device="cpu")


def test_another_size_is_another_model(tiny: tuple[Tiny, Path], tmp_path: Path) -> None:
    other = write_files(tmp_path, TINY, seed=3)
    report = align(tiny[1], other.file, IDS, steps=0, device="cpu")
    assert not report.aligned
    assert report.bad_tensors
    assert torch.isfinite(torch.tensor([row.difference.relative for row in report.rows])).all()
