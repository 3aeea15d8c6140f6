"""Wherever a build is interrupted, the existing engine stays, and no leftovers do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingot.engine.staging import staged_folder
from ingot.errors import BuildError


def old_engine(target: Path) -> Path:
    target.mkdir(parents=True)
    (target / "manifest.json").write_text("old")
    return target


def stage(target: Path, force: bool = True) -> None:
    with staged_folder(target, force=force, size=1) as folder:
        (folder / "manifest.json").write_text("new")


def test_an_engine_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    target = old_engine(tmp_path / "out" / "engine")
    stage(target)
    assert (target / "manifest.json").read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_an_interrupted_body_keeps_the_engine(tmp_path: Path) -> None:
    target = old_engine(tmp_path / "out" / "engine")
    with pytest.raises(KeyboardInterrupt), staged_folder(target, force=True, size=1):
        raise KeyboardInterrupt
    assert (target / "manifest.json").read_text() == "old"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("which", [1, 2])
def test_an_interrupt_around_each_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int, after: bool
) -> None:
    target = old_engine(tmp_path / "out" / "engine")
    rename, calls = Path.rename, []

    def interrupted(self: Path, other: Path) -> Path:
        calls.append(self)
        if len(calls) == which and not after:
            raise KeyboardInterrupt
        done = rename(self, other)
        if len(calls) == which:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage(target)
    swapped = which == 2 and after
    assert (target / "manifest.json").read_text() == ("new" if swapped else "old")
    assert list(target.parent.iterdir()) == [target]


def test_an_interrupt_right_after_the_folder_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def interrupted(self: Path, *values: object, **named: object) -> None:
        mkdir(self, *values, **named)  # type: ignore[arg-type]
        if self.name.startswith(".ingot-build-"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_an_engine_stays_a_link(tmp_path: Path) -> None:
    goal = old_engine(tmp_path / "goal")
    target = tmp_path / "engine"
    target.symlink_to(goal)
    stage(target)
    assert target.is_symlink()
    assert (goal / "manifest.json").read_text() == "new"
    assert sorted(tmp_path.iterdir()) == [target, goal]


def test_what_a_killed_build_left_is_put_right(tmp_path: Path) -> None:
    gone = 2**22 + 1  # above any process id
    old_engine(tmp_path / f".ingot-build-engine-{gone}-old")
    (tmp_path / f".ingot-build-engine-{gone}").mkdir()
    mine = tmp_path / f".ingot-build-engine-{os.getppid()}"
    mine.mkdir()
    with pytest.raises(BuildError, match="the engine exists"):
        stage(tmp_path / "engine", force=False)
    assert (tmp_path / "engine" / "manifest.json").read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [mine, tmp_path / "engine"]


def test_a_second_build_of_the_same_target_loses_at_once(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    with staged_folder(target, force=True, size=1) as folder:
        (folder / "manifest.json").write_text("first")
        with pytest.raises(BuildError, match="another build of this engine is under way"):
            stage(target)
        stage(tmp_path / "engine2")  # another target is another matter
    assert (target / "manifest.json").read_text() == "first"
    stage(target)
    assert sorted(tmp_path.iterdir()) == [target, tmp_path / "engine2"]


def test_an_engine_created_meanwhile_is_not_replaced_without_force(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    with pytest.raises(BuildError, match="the engine exists"), staged_folder(target, force=False, size=1):
        old_engine(target)  # by a machine that shares the disk, and no locks
    assert (target / "manifest.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_lock_of_a_killed_build_does_not_block(tmp_path: Path) -> None:
    (tmp_path / ".ingot-lock-engine").touch()
    stage(tmp_path / "engine")
    assert list(tmp_path.iterdir()) == [tmp_path / "engine"]


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(BuildError, match="not enough disk space"),
        staged_folder(tmp_path / "engine", force=False, size=1 << 60),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
