"""Processors that a process may use: its affinity, and the quotas of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ingot import LLM, device
from ingot.control_groups import usable_processors
from ingot.device import respect_quota
from ingot.serve.engine_calls import engine_process
from ingot.serve.engine_calls.process_protocol import LoadEngine
from tests.tiny_models import save_model, tiny_config
from tests.unit.test_host_memory import MOUNT, in_group, write


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may run on 16 processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)


def in_group_of_version_1(proc: Path, path: str) -> Path:
    """Put the process into a group of v1's processors, beside one of memory; returns where it is mounted."""
    mounted = proc / "cpu"
    write(proc / "self/cgroup", f"4:memory:/elsewhere\n3:cpu,cpuacct:{path}\n0::/")
    mounts = MOUNT.format(root="/", mounted=proc / "memory", kind="cgroup", options=",memory")
    mounts += MOUNT.format(root="/", mounted=mounted, kind="cgroup", options=",cpu,cpuacct")
    write(proc / "self/mountinfo", mounts)
    return mounted


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),  # the second one part of the time
        ("10000 100000", 1),
        ("0 100000", 1),
        ("9900000 100000", 16),
        ("max 100000", 16),
        ("200000", 16),
        ("200000 0", 16),
        ("-1 100000", 16),
        ("²00000 100000", 16),
        ("two processors", 16),
        ("", 16),
    ],
)
def test_a_quota_of_version_2(text: str, count: int, tmp_path: Path) -> None:
    write(in_group(tmp_path, "/a") / "a" / "cpu.max", text)
    assert usable_processors(tmp_path) == count


def test_the_least_of_the_parents_counts(tmp_path: Path) -> None:
    mounted = in_group(tmp_path, "/a/b")
    for folder, quota in (("a/b", 8), ("a", 3), ("", 5)):
        write(mounted / folder / "cpu.max", f"{quota}00000 100000")
    assert usable_processors(tmp_path) == 3


@pytest.mark.parametrize(("quota", "count"), [("250000", 3), ("-1", 16)])
def test_a_quota_of_version_1(quota: str, count: int, tmp_path: Path) -> None:
    folder = in_group_of_version_1(tmp_path, "/docker/x") / "docker/x"
    write(folder / "cpu.cfs_quota_us", quota)
    write(folder / "cpu.cfs_period_us", 100000)
    assert usable_processors(tmp_path) == count


def test_without_control_groups_the_affinity_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_processors(tmp_path) == 16
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_processors(tmp_path) == 1


class TestThreadsOfPyTorch:
    @pytest.fixture(autouse=True)
    def threads(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """PyTorch has 16, of a quota of 2; what it is given is kept here."""
        given: list[int] = []
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1] if given else 16)
        monkeypatch.setattr(torch, "set_num_threads", given.append)
        monkeypatch.setattr(device, "usable_processors", lambda: 2)
        respect_quota.cache_clear()
        return given

    def test_are_as_many_as_a_quota_allows(self, threads: list[int]) -> None:
        respect_quota()
        assert threads == [2]

    def test_set_later_stay(self, threads: list[int]) -> None:
        respect_quota()
        torch.set_num_threads(8)
        respect_quota()
        assert threads == [2, 8]

    def test_fewer_stay(self, threads: list[int]) -> None:
        torch.set_num_threads(1)
        respect_quota()
        assert threads == [1]

    @pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
    def test_of_the_environment_stay(
        self, name: str, threads: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, "16")
        respect_quota()
        assert threads == []

    def test_without_a_quota_are_pytorch_s(self, threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "usable_processors", lambda: 16)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
        respect_quota()
        assert threads == []

    def test_are_settled_when_a_model_is_opened(self, threads: list[int], tmp_path: Path) -> None:
        save_model(tiny_config("llama"), tmp_path, seed=3)
        LLM(tmp_path, "cpu")
        assert threads[:1] == [2]

    @pytest.mark.parametrize(("given", "expected"), [(None, [2]), (5, [5])])
    def test_of_a_server_s_engine_too(
        self, given: int | None, expected: list[int], threads: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_process, "check_manifest", lambda *_: 1 / 0)  # after its threads
        with pytest.raises(ZeroDivisionError):
            engine_process._open(LoadEngine("engine", threads=given))
        assert threads == expected
