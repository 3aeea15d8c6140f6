"""Limits that control groups (v1 and v2) set for this process, and the processors that it may use.

usable_processors()  # 2 in a container whose quota is two, however many the machine has
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

PROC = Path("/proc")


def usable_processors(proc: Path = PROC) -> int:
    """Processors that this process may keep busy: those of its affinity, at most as many as the quotas of its
    control groups allow, rounded up; at least 1.
    """
    return max(1, min([affine_processors(), *map(ceil, _quotas(proc))]))


def affine_processors() -> int:
    """Processors on which this process may run; all of them where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(proc: Path) -> Iterator[float]:
    """How many processors' time each control group that has a quota allows."""
    for folder, is_v2 in group_folders(proc, "cpu"):
        names = ["cpu.max"] if is_v2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        words = " ".join(line for name in names for line in lines_of(folder / name)).split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # not "max", not -1
            yield int(words[0]) / int(words[1])


def group_folders(proc: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of the control groups that may limit what ``controller`` counts, from this process's own up to
    the mounted one, each with whether it is of v2.
    """
    paths = dict(
        line.split(":", 2)[1:] for line in lines_of(proc / "self" / "cgroup") if line.count(":") >= 2
    )
    for line in lines_of(proc / "self" / "mountinfo"):
        left, right = (part.split() for part in line.partition(" - ")[::2])
        if right[:1] == ["cgroup2"]:
            path, is_v2 = paths.get(""), True
        elif right[:1] == ["cgroup"] and controller in right[-1].split(","):
            own = (path for which, path in paths.items() if controller in which.split(","))
            path, is_v2 = next(own, None), False
        else:
            continue
        root, mounted = left[3:5]
        inside = Path((path or "/").removeprefix(root).lstrip("/"))
        for part in (inside, *inside.parents):
            yield Path(mounted) / part, is_v2


def lines_of(path: Path) -> list[str]:
    """A file's lines; none if it cannot be read, as outside Linux."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
