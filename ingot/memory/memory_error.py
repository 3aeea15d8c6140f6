"""A device's capacity, and OutOfMemoryErrors that carry the ledger and its fixes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ingot.config.units import size_text
from ingot.device import host_memory
from ingot.errors import OutOfMemoryError
from ingot.memory.fix_text import fixes_in_python
from ingot.memory.ledger import CONTEXT_BYTES, Capacity, MemorySetting, ledger
from ingot.memory.memory_fixes import eased, fixes
from ingot.memory.memory_sizes import CPU_PROCESS_BYTES


def capacity_of(device: torch.device, own: int | None = None) -> Capacity:
    """A device's memory, and what others hold of it: neither this engine's tensors nor the process's context.

    Args:
        own: bytes of this process's tensors that are the engine's; None: all of them.
    """
    if device.type != "cuda":
        host = host_memory()
        ours = host.held if own is None else min(host.held, own + CPU_PROCESS_BYTES)
        return Capacity(host.name, host.total, max(host.total - host.available - ours, 0))
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device) + CONTEXT_BYTES
    if own is not None:
        ours -= max(torch.cuda.memory_allocated(device) - own, 0)
    return Capacity(torch.cuda.get_device_name(device), total, max(total - free - ours, 0))


def out_of_memory(
    what: str,
    setting: MemorySetting,
    capacity: Capacity,
    *,
    seen: object = None,
    allowed: object = None,
) -> OutOfMemoryError:
    """An error with the setting's ledger on the capacity, as lines and as data, and the first fixes.

    Where the ledger sees room enough, memory went elsewhere: the fixes are then smaller steps and caches.
    """
    found = ledger(setting, capacity)
    options = fixes(found, "loads") or eased(found)
    data = found.to_json() | {"fixes": [fix.to_json() for fix in options]}
    return OutOfMemoryError(
        what,
        seen=seen,
        allowed=allowed,
        fix=fixes_in_python(data["fixes"]),
        ledger=data,
        lines=tuple(found.lines()),
    )


def measured(capacity: Capacity, setting: MemorySetting, room: int, activations: int) -> Capacity:
    """The capacity corrected by measurements, so that its ledger offers fixes that work there.

    Args:
        room: bytes that are left for the cache.
        activations: bytes that the largest step takes.

    What the ledger's own predictions lack counts as others'.
    """
    found = ledger(setting, capacity)
    excess = activations - found.of("activations")
    lost = (found.usable or 0) - found.fixed - room - excess
    return replace(capacity, others=capacity.others + max(lost, 0) + max(excess, 0))


@contextmanager
def explained(
    what: str, setting: MemorySetting, device: torch.device, *, own: int | None = None
) -> Iterator[Capacity]:
    """A block in which running out of memory, of a GPU or of the host, becomes an OutOfMemoryError; gives the
    capacity at its start. On a CPU the ledger is checked before the block begins: a system without memory
    kills the process without a message.

    Args:
        own: as of ``capacity_of``.

    Raises:
        OutOfMemoryError: as ``out_of_memory``.
    """
    capacity = capacity_of(device, own)
    if setting.device == "cpu":
        found = ledger(setting, capacity)
        room = found.usable or 0
        if found.least > room:
            raise out_of_memory(
                "the engine does not fit this machine's memory",
                setting,
                capacity,
                seen=f"it takes {size_text(found.least)} with a cache for one request",
                allowed=f"at most {size_text(max(room, 0))}",
            )
    with described(what, setting, capacity):
        yield capacity


@contextmanager
def described(what: str, setting: MemorySetting, capacity: Capacity) -> Iterator[None]:
    """``explained`` of a capacity that is known, without its check before the block."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        raise out_of_memory(what, setting, capacity, seen=first_sentence(error)) from None


def ran_out(error: BaseException) -> bool:
    """Whether an allocator, of a GPU or of the host, found no memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):  # of a mapping, as weights in large pages are
        return error.errno == errno.ENOMEM
    words = ("can't allocate memory", "out of memory")  # the latter of CUDA's own calls, such as a graph's
    return isinstance(error, RuntimeError) and any(one in str(error) for one in words)


def first_sentence(error: BaseException) -> str | None:
    return str(error).split(". ")[0].strip() or None
