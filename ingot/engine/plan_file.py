"""plan.json: reading, writing, and whether a kernel plan can be used on this machine.

The file ends with a hash of what is before it, so that an edited plan can be told from one that was measured
again. The manifest does not have that hash: it stays as built when ``tune`` writes another plan.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import triton

from ingot.config.files.atomic_write import atomic_file
from ingot.config.files.json_text import load_json, parse_json, read_text
from ingot.config.kernel_plan import KernelPlan, PlanMachine
from ingot.engine.manifest import PLAN_FILE
from ingot.errors import BuildError, ConfigError, EngineError, IngotError

_log = logging.getLogger(__name__)
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, IngotError)
_HASH = "sha256"


def read_plan(path: Path) -> KernelPlan:
    """The kernel plan in a user's file; one without a hash may have been edited.

    Raises:
        ConfigError: there is no such file, it is no plan, or its hash differs.
    """
    try:
        data = load_json(path)
        if _HASH in data and data.pop(_HASH) != _digest(data):
            raise ValueError(
                f"it was edited after its {_HASH} was written; delete that line to use it as it is"
            )
        return KernelPlan.from_json(data)
    except _UNREADABLE as error:
        seen = f"{path}: {_reason(error)}"
        raise ConfigError("the kernel plan cannot be read", seen=seen, field="plan") from None


def read_own_plan(folder: Path, device: torch.device | None = None) -> KernelPlan:
    """The plan of an engine; defaults where it has none.

    On a CPU, which runs no kernels, a plan that cannot be read is only a warning in the log.

    Raises:
        EngineError: plan.json was changed, or is another version's.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        return KernelPlan()
    data = plan_data(path)
    if data is None:
        raise EngineError("the engine's kernel plan was changed", seen=path, fix=plan_fix(folder))
    try:
        return KernelPlan.from_json(data)
    except _UNREADABLE as error:
        if device is not None and device.type == "cpu":
            text = "ignoring %s, which cannot be read (a CPU needs no kernel plan): %s"
            _log.warning(text, PLAN_FILE, _reason(error))
            return KernelPlan()
        raise EngineError(
            "the engine's kernel plan was written by another version of Ingot",
            seen=f"{path}: {_reason(error)}",
            fix=plan_fix(folder),
        ) from None


def plan_data(path: Path) -> dict[str, Any] | None:
    """The content of an engine's plan.json without its hash; None: it is not as it was written."""
    try:
        text = read_text(path)
        data: dict[str, Any] = parse_json(text)
        data.pop(_HASH)
        return data if text == _sealed(data) else None
    except (*_UNREADABLE, KeyError):
        return None


def plan_fix(folder: Path) -> str:
    return f"`ingot tune {folder}`, or delete {PLAN_FILE} to run with the defaults"


def _reason(error: Exception) -> str:
    """An error's message in one line, without what it says of flags."""
    if not isinstance(error, IngotError):
        return str(error)
    seen = error.seen if isinstance(error.seen, (list, tuple)) else [error.seen]
    return error.what if error.seen is None else f"{error.what}: {', '.join(map(str, seen))}"


def plan_text(plan: KernelPlan) -> str:
    """The text of plan.json; the same plan gives the same text."""
    return _sealed(plan.to_json())


def _sealed(data: dict[str, Any]) -> str:
    return json.dumps(data | {_HASH: _digest(data)}, indent=2) + "\n"


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()


def expect_writable(path: Path) -> None:
    """Refuse a path where no plan can be written, before anything is measured.

    Raises:
        BuildError: the folder does not exist or may not be written.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise BuildError("the kernel plan cannot be written", seen=path, fix="`output`, a file in a folder")


def write_plan(path: Path, plan: KernelPlan) -> None:
    """Write a plan atomically; an existing one is replaced.

    Raises:
        BuildError: the path cannot be written.
    """
    try:
        with atomic_file(path) as part:
            part.write_text(plan_text(plan), encoding="utf-8")
    except OSError as error:
        raise BuildError("the kernel plan cannot be written", seen=error, fix="`output`") from None


def machine_of(device: torch.device, dtype: torch.dtype) -> PlanMachine:
    """What tile choices depend on; for a CPU, its name."""
    name, capability = "CPU", "0.0"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return PlanMachine(name, capability, dtype.itemsize, torch.__version__, triton.__version__)


def usable_plan(plan: KernelPlan, device: torch.device, dtype: torch.dtype) -> tuple[KernelPlan, str | None]:
    """The plan to run with, and why it is not the given one: choices measured elsewhere may not even launch.

    A CPU runs no kernels: the plan stays, without a warning.
    """
    if device.type != "cuda":
        return plan, None
    why_not = plan.why_unfit(machine_of(device, dtype))
    return (plan, None) if why_not is None else (KernelPlan(), why_not)


def plan_here(folder: Path, device: torch.device, dtype: torch.dtype) -> KernelPlan:
    """An engine's kernel plan; where it was measured elsewhere, the defaults, with a warning."""
    plan, why_not = usable_plan(read_own_plan(folder, device), device, dtype)
    if why_not is not None:
        text = "using default tiles, not the kernel plan: %s (run `ingot tune` on this machine)"
        _log.warning(text, why_not)
    return plan
