"""Examples that lack something end with a message, not with a traceback."""

from __future__ import annotations

import io
import runpy
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recipes.vision.scenes import held_out_scene

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.stays("words0-error: ", "words4-error: no server answers at")
@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("quickstart.py", "{tmp}/nowhere", "{tmp}/engine"), "error: "),
        (("quickstart.py", "only one"), "python examples/quickstart.py"),
        (("clients/transcribe.py",), "python examples/clients/transcribe.py"),
        (("clients/transcribe.py", "{tmp}/nothing.wav"), "error: no such file"),
        (("clients/transcribe.py", "{tmp}/some.wav", "http://127.0.0.1:9"), "error: no server answers at"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], reported: str
) -> None:
    (tmp_path / "some.wav").write_bytes(b"RIFF")
    script, *rest = (word.replace("{tmp}", str(tmp_path)) for word in words)
    monkeypatch.setattr("sys.argv", [script, *rest])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert reported in str(ended.value)


def test_what_an_install_promises() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "ingot[serve]" in project["project"]["optional-dependencies"]["web"]
    assert project["tool"]["distutils"]["editable_wheel"] == {"mode": "compat"}  # type checkers find Ingot


def test_the_demo_shows_a_picture_and_what_is_in_it(tmp_path: Path) -> None:
    """A scene of the recipe, its caption and an answer in the second round."""
    demo = runpy.run_path(str(ROOT / "examples/demo.py"))
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system="truecolor", width=100, highlight=False)
    demo["show_picture"](console, tmp_path / "engine", tmp_path / "scene.png")
    scene = held_out_scene(demo["SCENE"])
    blocks, _, said = text.getvalue().partition(demo["ABOUT_IT"][0])
    assert blocks.count("▀") == demo["COLUMNS"] * demo["COLUMNS"] // 2
    assert all(f"{one.size} {one.colour} {one.kind}" in said for one in scene.things)
    star = next(one for one in scene.things if one.kind == "star")
    assert f"{demo['ABOUT_IT'][1]}\x1b[0m\n{star.colour}\n" in said
    assert (tmp_path / "scene.png").read_bytes().startswith(b"\x89PNG")
    plain = Console(file=io.StringIO(), width=100)
    assert plain.color_system is None  # a file or a terminal without colours gets no blocks


def test_half_blocks_are_the_picture_s_pixels() -> None:
    half_blocks = runpy.run_path(str(ROOT / "examples/demo.py"))["half_blocks"]
    picture = torch.arange(3 * 4 * 4, dtype=torch.uint8).view(3, 4, 4)
    text = half_blocks(picture, columns=2)
    assert text.plain == "▀▀\n"
    means = picture.float().view(3, 2, 2, 2, 2).mean((2, 4)).round().int()
    styles = [str(span.style) for span in text.spans]
    rgb = [[",".join(map(str, means[:, row, column].tolist())) for column in (0, 1)] for row in (0, 1)]
    assert styles == [f"rgb({rgb[0][column]}) on rgb({rgb[1][column]})" for column in (0, 1)]
