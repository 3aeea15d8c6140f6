"""Memory that a process may use: the machine's, control groups' and its own limits."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from ingot.device import HostMemory, host_memory

KIB, MIB = 1 << 10, 1 << 20
MOUNT = "36 31 0:32 {root} {mounted} rw,relatime - {kind} {kind} rw{options}\n"
UNLIMITED = "9223372036854771712"


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The process's limits; none unless a test sets some."""
    limits: dict[int, int] = {}
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: (limits.get(which, resource.RLIM_INFINITY), resource.RLIM_INFINITY),
    )
    return limits


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine of 1000 MiB with 800 available, and a process that holds 50 of 700 mapped."""
    (tmp_path / "self").mkdir()
    write(
        tmp_path / "meminfo", f"MemTotal: {1000 * KIB} kB\nMemAvailable: {800 * KIB} kB\nHugePages_Total: 0\n"
    )
    status = {"VmSize": 700, "VmData": 60, "RssAnon": 50}
    write(
        tmp_path / "self/status", "Name:\tx\n" + "".join(f"{k}:\t{v * KIB} kB\n" for k, v in status.items())
    )
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group(folder: Path, limit: object, used: int, cached: int, *, v2: bool = True) -> None:
    """A control group's files; ``used`` and ``cached`` in MiB."""
    names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write(folder / names[0], limit)
    write(folder / names[1], used * MIB)
    half = cached * MIB // 2
    prefix, own = ("", "") if v2 else ("total_", "active_file 0\ninactive_file 0\n")
    write(folder / "memory.stat", f"{own}{prefix}active_file {half}\n{prefix}inactive_file {half}")


def in_group(proc: Path, path: str, root: str = "/") -> Path:
    """Put the process into a control group of version 2; returns where groups are mounted."""
    mounted = proc / "cgroup"
    write(proc / "self/cgroup", f"0::{path}")
    write(proc / "self/mountinfo", MOUNT.format(root=root, mounted=mounted, kind="cgroup2", options=""))
    return mounted


def test_the_machine_s_own(proc: Path) -> None:
    assert host_memory(proc) == HostMemory("this machine's memory", 1000 * MIB, 800 * MIB, 50 * MIB)


def test_without_proc_all_that_there_is(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert found.total == found.available > 0
    assert found.held == 0


@pytest.mark.parametrize(("root", "path"), [("/", "/a/b"), ("/a/b", "/a/b"), ("/a", "/a/b"), ("/", "/")])
def test_a_group_of_version_2(proc: Path, root: str, path: str) -> None:
    mounted = in_group(proc, path, root)
    group(mounted / path.removeprefix(root).lstrip("/"), 500 * MIB, used=300, cached=100)
    found = host_memory(proc)
    assert found == HostMemory("the cgroup's memory limit", 500 * MIB, 300 * MIB, 50 * MIB)


def test_a_parent_s_limit_holds_too(proc: Path) -> None:
    mounted = in_group(proc, "/a/b")
    group(mounted / "a/b", "max", used=100, cached=0)
    group(mounted / "a", 400 * MIB, used=250, cached=0)
    assert host_memory(proc).available == 150 * MIB


def test_a_group_of_version_1(proc: Path) -> None:
    mounted = proc / "cgroup/memory"
    write(proc / "self/cgroup", "4:memory:/box\n3:cpu:/other\n0::/")
    mounts = MOUNT.format(root="/", mounted=proc / "cgroup/cpu", kind="cgroup", options=",cpu")
    mounts += MOUNT.format(root="/", mounted=mounted, kind="cgroup", options=",memory")
    write(proc / "self/mountinfo", mounts)
    group(mounted, UNLIMITED, used=900, cached=0, v2=False)
    group(mounted / "box", 600 * MIB, used=200, cached=40, v2=False)
    assert host_memory(proc).available == 440 * MIB


@pytest.mark.parametrize(("limit", "used", "left"), [("max", 900, 800), (100 * MIB, 120, 0)])
def test_unlimited_groups_leave_the_machines_memory_and_full_ones_none(
    proc: Path, limit: object, used: int, left: int
) -> None:
    group(in_group(proc, "/"), limit, used=used, cached=0)
    assert host_memory(proc).available == left * MIB


@pytest.mark.parametrize(
    ("which", "name", "left"), [("RLIMIT_AS", "ulimit -v", 200), ("RLIMIT_DATA", "ulimit -d", 840)]
)
def test_the_process_s_own_limits(
    proc: Path, unlimited: dict[int, int], which: str, name: str, left: int
) -> None:
    write(proc / "meminfo", f"MemTotal: {9000 * KIB} kB\nMemAvailable: {8000 * KIB} kB")
    unlimited[getattr(resource, which)] = 900 * MIB
    found = host_memory(proc)
    assert (found.total, found.available) == (900 * MIB, left * MIB)
    assert name in found.name


def test_this_machine_has_some() -> None:
    found = host_memory()
    assert 256 * MIB < found.available <= found.total
    assert found.held > MIB
