"""The ledger as an error: what was asked for, what there is, and what to change.

Owns the reading of a device's memory and the making of every OutOfMemoryError that has a setting. Knows no
formula.

    with explained("the weights do not fit the device", setting, device): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ingot.device import host_memory
from ingot.engine.fixes import Goal, fixes
from ingot.engine.ledger import CONTEXT_BYTES, Capacity, Setting, ledger
from ingot.errors import OutOfMemoryError

_SHOWN = 3


def capacity_of(device: torch.device) -> Capacity:
    """What a device has, and what others hold of it: neither this process's tensors nor its context."""
    if device.type != "cuda":
        return Capacity("this machine's memory", host_memory())
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device) + CONTEXT_BYTES
    return Capacity(torch.cuda.get_device_name(device), total, max(total - free - ours, 0))


def out_of_memory(
    what: str,
    setting: Setting,
    device: torch.device,
    *,
    seen: object = None,
    allowed: object = None,
    goal: Goal = "loads",
) -> OutOfMemoryError:
    """An error with the setting's ledger on the device, as lines and as data, and the first fixes.

    Where the ledger sees room enough, memory went elsewhere: the fix is then a smaller share of the device.
    """
    found = ledger(setting, capacity_of(device))
    options = fixes(found, goal)
    shown = [f"{fix.flags} ({fix.where}; costs {fix.cost})" for fix in options[:_SHOWN]]
    if not shown:
        smaller = max(round(setting.runtime.memory_fraction - 0.1, 2), 0.1)
        shown = [f"a smaller memory_fraction (RuntimeConfig(memory_fraction={smaller:g})) or token_budget"]
        shown.append("--max-seq-len, or end what else uses the device")
    data = found.to_json() | {"fixes": [fix.to_json() for fix in options]}
    fix = " or ".join(shown)
    return OutOfMemoryError(
        what, seen=seen, allowed=allowed, fix=fix, ledger=data, lines=tuple(found.lines())
    )


@contextmanager
def explained(what: str, setting: Setting, device: torch.device) -> Iterator[None]:
    """A block in which running out of memory, of a GPU or of the host, becomes an OutOfMemoryError.

    Raises:
        OutOfMemoryError: as ``out_of_memory``.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(what, setting, device, seen=first_sentence(error)) from None
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise out_of_memory(what, setting, device, seen=first_sentence(error)) from None


def first_sentence(error: BaseException) -> str | None:
    """What an allocator's error says first."""
    return str(error).split(". ")[0].strip() or None
