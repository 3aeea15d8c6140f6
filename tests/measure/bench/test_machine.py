"""What a record says of the machine: memory, operating system, NUMA nodes."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from ingot.measure.side.machine import machine, numa_nodes, operating_system


def test_a_record_names_memory_and_system() -> None:
    found = machine(torch.device("cpu"))
    kilobytes = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    assert found["ram_gb"] == pytest.approx(kilobytes * 1024 / 1e9, abs=0.06)  # rounded to a tenth
    assert found["os"].endswith(f"Linux {os.uname().release}")
    assert found["numa_nodes"] is None or found["numa_nodes"] >= 1


def test_numa_nodes_are_counted(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path / "nowhere") is None
    for name in ("node0", "node1", "node10", "has_cpu", "nodes", "node_1"):
        (tmp_path / name).mkdir()
    assert numa_nodes(tmp_path) == 3


def test_a_system_without_os_release(monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"NAME": "Some Linux", "PRETTY_NAME": "Some Linux 7"}
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: name)
    assert operating_system() == f"Some Linux 7, {platform.system()} {platform.release()}"

    def missing() -> dict[str, str]:
        raise FileNotFoundError("/etc/os-release")

    monkeypatch.setattr(platform, "freedesktop_os_release", missing)
    assert operating_system() == f"{platform.system()} {platform.release()}"
