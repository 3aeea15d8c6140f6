"""What verbs say of engines and files of pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ingot import build
from ingot.cli.main import app

POCKET = Path(__file__).parents[2] / "models/pocket-vision/minigpt4.yaml"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(POCKET, tmp_path_factory.mktemp("pictures") / "engine", device="cpu")


def ingot(*args: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(arg) for arg in args])
    return found.exit_code, " ".join(found.output.split())


@pytest.mark.parametrize("of", ["files", "engine"])
def test_plan_and_inspect(of: str, engine: Path) -> None:
    path = POCKET if of == "files" else engine
    code, text = ingot("plan", path)
    assert (code, "embeddings of 24576 positions" in text) == (0, True), text
    code, text = ingot("inspect", path)
    assert code == 0, text
    for fact in ("minigpt4 (a model of pictures and text, prefix)", "3 x 112 x 112", "chat format minigpt4"):
        assert fact in text


def test_a_proof_says_what_it_is_of(engine: Path) -> None:
    code, text = ingot("verify", engine, "--source", POCKET)
    assert (code, "source 150 tensors compared with the checkpoint" in text) == (0, True), text
    assert "the proof says nothing" not in text
    assert "pixels 0." in text


def test_align_reads_the_files(engine: Path) -> None:
    code, text = ingot("align", engine, "--reference", POCKET, "--device", "cpu", "--steps", 1)
    assert (code, text.endswith("aligned")) == (0, True), text
    for stage in ("pixels", "encoder.vit.patch_embedding", "encoder.ln_vision", "encoder.projector"):
        assert stage in text
