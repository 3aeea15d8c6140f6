"""``ingot build --model minigpt4`` from flags: the engine of the YAML file that names the same files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ingot import build
from ingot.building.builder import build as build_engine
from ingot.checkpoint.minigpt4_files import MiniGPT4Files
from ingot.cli.main import app
from ingot.errors import IngotError
from tests.vision.files import Shape, write_files

# The number of blocks and heads of the official files, which no flag changes.
_SIZES = {"side": 224, "patch": 56, "width": 32, "heads": 16, "depth": 39, "inner": 16}
OFFICIAL = Shape(**_SIZES, queries=3, qformer_width=24, qformer_heads=12, qformer_layers=2, qformer_inner=8)
OFFICIAL_LLAMA2 = Shape(**_SIZES, queries=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("official")
    write_files(folder, OFFICIAL)
    return folder


def flags(folder: Path, **change: str | None) -> list[str]:
    """--model and its files; those of value None are left out."""
    named: dict[str, str | None] = {
        "model": "minigpt4",
        "llm": str(folder / "llama"),
        **{part: str(folder / f"{part}.pth") for part in ("vit", "qformer", "projector")},
    }
    named |= change
    return [word for name, value in named.items() if value is not None for word in (f"--{name}", value)]


def ingot(*args: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(arg) for arg in args])
    return found.exit_code, " ".join(found.output.split())


def contents(engine: Path) -> Mapping[str, bytes]:
    files = (file for file in engine.rglob("*") if file.is_file() and file.name != "verify.json")
    return {str(file.relative_to(engine)): file.read_bytes() for file in files}


def test_flags_build_what_the_yaml_file_builds(folder: Path, tmp_path: Path) -> None:
    rest = ["--dtype", "fp32", "--device", "cpu", "--max-seq-len", "64"]
    code, text = ingot("build", *flags(folder), "-o", tmp_path / "flags", *rest)
    assert code == 0, text
    plain = {"model": "minigpt4", "llm": "llama"}
    plain |= {part: f"{part}.pth" for part in ("vit", "qformer", "projector")}
    named = folder / "plain.yaml"
    named.write_text(yaml.safe_dump(plain))
    build(named, tmp_path / "yaml", dtype="fp32", device="cpu", max_seq_len=64)
    assert contents(tmp_path / "flags") == contents(tmp_path / "yaml")
    assert (tmp_path / "flags/proof.json").is_file()


def test_without_a_qformer_it_is_the_variant_of_llama_2(tmp_path: Path) -> None:
    write_files(tmp_path, OFFICIAL_LLAMA2)
    made = tmp_path / "engine"
    code, text = ingot("build", *flags(tmp_path, qformer=None), "-o", made, "--device", "cpu", "--no-proof")
    assert code == 0, text
    code, text = ingot("inspect", made)
    assert "chat format minigpt4-llama2" in text


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({"model": None}, (), "--llm: it needs --model minigpt4"),
        ({"model": None, "llm": None, "vit": None, "qformer": None}, (), "--projector: it needs --model"),
        ({"model": "minigpt-v2"}, (), "--model: minigpt-v2; allowed: minigpt4"),
        ({"vit": None, "llm": None}, (), "--model minigpt4: it needs --llm, --vit"),
        ({"projector": None}, (), "it needs --projector"),
        ({}, ("models/pocket-chat",), "it takes the place of CHECKPOINT, but models/pocket-chat is given"),
        ({"vit": "nowhere.pth"}, (), "--vit: file 'nowhere.pth' does not exist"),
        ({"llm": "nowhere"}, (), "--llm: dir 'nowhere' does not exist"),
        ({}, ("--prove", "text.txt"), "--prove: it needs one path: name the files in a YAML file"),
    ],
)
def test_flags_that_do_not_go_together(
    folder: Path, tmp_path: Path, change: dict[str, str | None], more: tuple[str, ...], message: str
) -> None:
    code, text = ingot("build", *more, *flags(folder, **change), "-o", tmp_path / "out")
    assert code == 2
    assert message in text
    assert not (tmp_path / "out").exists()


def test_neither_a_checkpoint_nor_flags(tmp_path: Path) -> None:
    code, text = ingot("build", "-o", tmp_path / "out")
    missing = "CHECKPOINT: missing: a folder, an id, or --model with its files"
    assert (code, missing in text) == (2, True), text


def test_files_in_the_wrong_places_are_refused(folder: Path, tmp_path: Path) -> None:
    swapped = flags(folder, vit=str(folder / "projector.pth"), projector=str(folder / "vit.pth"))
    code, text = ingot("build", *swapped, "-o", tmp_path / "out", "--device", "cpu")
    assert code == 1
    assert re.search(r"vit\.|projector", text), text
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_gone_is_named_from_python(folder: Path, tmp_path: Path) -> None:
    files = MiniGPT4Files(folder / "llama", folder / "absent.pth", folder / "projector.pth")
    with pytest.raises(IngotError, match=r"absent\.pth"):
        build_engine(files, tmp_path / "out", device="cpu")
