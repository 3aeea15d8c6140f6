"""Links out of a checkpoint's folder are not followed, but for those of the Hugging Face cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingot.checkpoint.checkpoint_files import leads_outside, list_files
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.hub import resolve_checkpoint, resolve_config
from ingot.errors import CheckpointError
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "checkpoint")


@pytest.mark.parametrize("name", ["model.safetensors", "chat_template.jinja", "config.json", "inner"])
def test_a_link_out_of_a_checkpoint_is_refused_by_all_that_read_it(
    folder: Path, tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "outside"
    if (folder / name).exists():
        (folder / name).rename(outside)
    elif name == "inner":
        outside.mkdir()
    else:
        outside.write_text("secret")
    (folder / name).symlink_to(outside)
    for read in (list_files, open_checkpoint, resolve_checkpoint, resolve_config):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        assert caught.value.what == f"links in {folder} lead outside it"
        assert caught.value.seen == f"{name} -> {outside}"
    shown = ingot("inspect", folder)
    assert shown.exit_code == 1
    assert f"{name} -> {outside}" in shown.stderr
    assert not (tmp_path / "engine").exists()
    assert ingot("build", folder, "-o", tmp_path / "engine", "--device", "cpu").exit_code == 1
    assert not (tmp_path / "engine").exists()


def test_links_within_a_checkpoint_and_to_it_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    (folder / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to(folder)
    assert "model.safetensors" in list_files(tmp_path / "link")
    with open_checkpoint(tmp_path / "link") as checkpoint:
        assert checkpoint.tensors


def test_a_folder_without_a_checkpoint_is_reported_first(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        open_checkpoint(tmp_path / "folder")


class TestCache:
    @pytest.fixture
    def snapshot(self, folder: Path, tmp_path: Path) -> Path:
        """The checkpoint as a snapshot of huggingface_hub's cache."""
        repository = tmp_path / "models--org--name"
        snapshot = repository / "snapshots" / ("a" * 40)
        snapshot.parent.mkdir(parents=True)
        folder.rename(snapshot)
        (repository / "blobs").mkdir()
        for number, path in enumerate(sorted(snapshot.iterdir())):
            path.rename(repository / "blobs" / f"{number:040x}")
            path.symlink_to(f"../../blobs/{number:040x}")
        return snapshot

    def test_its_blobs_are_read(self, snapshot: Path, tmp_path: Path) -> None:
        (tmp_path / "cache").symlink_to(snapshot.parents[1])
        for place in (snapshot, tmp_path / "cache" / "snapshots" / snapshot.name):
            with open_checkpoint(place) as checkpoint:
                assert checkpoint.tensors

    @pytest.mark.parametrize(
        "target", ["../../refs/main", "../other/x", "../../blobs/deep/x", "../../../out"]
    )
    def test_no_other_place_of_it_is(self, snapshot: Path, target: str) -> None:
        place = Path(os.path.normpath(snapshot / target))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("secret")
        (snapshot / "chat_template.jinja").symlink_to(target)
        assert leads_outside(snapshot, snapshot / "chat_template.jinja")
        with pytest.raises(CheckpointError, match="lead outside it"):
            open_checkpoint(snapshot)

    def test_blobs_that_are_links_themselves_are_not_followed(self, snapshot: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        blob = snapshot.parents[1] / "blobs" / "f"
        blob.symlink_to(tmp_path / "secret")
        (snapshot / "chat_template.jinja").symlink_to("../../blobs/f")
        assert leads_outside(snapshot, snapshot / "chat_template.jinja")

    def test_a_folder_of_blobs_that_is_a_link_is_not_followed(self, snapshot: Path, tmp_path: Path) -> None:
        blobs = snapshot.parents[1] / "blobs"
        blobs.rename(tmp_path / "elsewhere")
        blobs.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="lead outside it"):
            open_checkpoint(snapshot)

    def test_another_folder_beside_blobs_is_not_the_cache(self, snapshot: Path) -> None:
        copies = snapshot.parent.rename(snapshot.parents[1] / "copies")
        with pytest.raises(CheckpointError, match="lead outside it"):
            open_checkpoint(copies / snapshot.name)
