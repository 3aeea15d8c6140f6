"""Where built kernels are kept: Triton's folder, unless it cannot be used."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from triton import knobs

from ingot.errors import DeviceError
from ingot.kernels.kept_kernels import _temporary_folders, find_kernel_folder

Disk = Callable[[Path], SimpleNamespace]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Triton would use, and another one for temporary ones."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    find_kernel_folder.cache_clear()
    yield tmp_path / "kernels"
    del knobs.cache.dir
    find_kernel_folder.cache_clear()
    for made in _temporary_folders:
        made.cleanup()
    _temporary_folders.clear()


def disks(monkeypatch: pytest.MonkeyPatch, flags: int, free: int, where: Path) -> None:
    """Let the disk of one folder, and of those in it, have these flags and bytes free."""
    usual = os.statvfs

    def statvfs(path: Path) -> object:
        if not Path(path).is_relative_to(where):
            return usual(path)
        return SimpleNamespace(f_flag=flags, f_bavail=free >> 12, f_frsize=1 << 12)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_a_folder_that_can_be_used_stays(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    find_kernel_folder()
    assert (knobs.cache.dir, folder.is_dir(), caplog.records) == (str(folder), True, [])


@pytest.mark.parametrize(
    ("flags", "free", "says"),
    [(os.ST_NOEXEC, 1 << 40, "mounted with noexec"), (0, 200 << 20, "200 MiB are free, of at least 256")],
)
def test_a_disk_that_cannot_be_used(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: int,
    free: int,
    says: str,
) -> None:
    """What it holds already is still found."""
    (folder / "KEY").mkdir(parents=True)
    (folder / "KEY" / "kernel.cubin").write_text("built")
    disks(monkeypatch, flags, free, folder)
    with caplog.at_level(logging.WARNING):
        find_kernel_folder()
    other = Path(knobs.cache.dir)
    assert other.parent == folder.parent / "tmp"
    assert (other / "KEY" / "kernel.cubin").read_text() == "built"
    assert os.environ["TRITON_CACHE_DIR"] == str(other)  # of processes that this one starts
    (line,) = [record.getMessage() for record in caplog.records]
    assert says in line
    assert str(folder) in line
    assert "set TRITON_CACHE_DIR" in line


def test_a_folder_that_cannot_be_made(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file is in its place")
    find_kernel_folder()
    assert Path(knobs.cache.dir).parent == folder.parent / "tmp"
    assert "File exists" in caplog.text


def test_no_folder_can_be_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disks(monkeypatch, os.ST_NOEXEC, 1 << 40, Path("/"))
    with pytest.raises(DeviceError, match=r"(?s)no place.*noexec.*TRITON_CACHE_DIR"):
        find_kernel_folder()
    assert knobs.cache.dir == str(folder)
