"""Signs that a measurement cannot be trusted: runs far apart, times below zero, more than the ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FAR_APART = 1.5  # slowest run over fastest
OVER = 1.05  # times the ceiling, which varies by a few percent itself
_SHARES = {"mbu": "MBU", "mfu": "MFU", "mfu_decode": "decode MFU", "mfu_prefill": "prefill MFU"}
_TIMES = {"ttft_ms": "TTFT", "decode_ms": "decode time", "seconds": "seconds"}


def doubts(entries: Sequence[dict[str, Any]]) -> list[str]:
    """One line per sign in the entries of one side."""
    found = []
    for entry in entries:
        where = f"batch {entry['batch']}: " if "batch" in entry else ""
        waits = "streamed" not in entry and "ttft_ms" in entry  # requests of a load wait for one another
        for name, label in _TIMES.items():
            times = entry.get(name)
            if times is None or (name == "ttft_ms" and waits):
                continue
            least, most = times["least"], times["most"]
            if least <= 0:
                why = "longer runs took no longer; measure with more new tokens"
                found.append(f"{where}{label} of {least:.3g}: {why}")
            elif most > FAR_APART * least:
                why = "something else disturbed the runs"
                found.append(f"{where}{label} from {least:.3g} to {most:.3g}: {why}")
        for name, label in _SHARES.items():
            share = entry.get(name)
            if share is not None and share > OVER:
                why = "the machine was slower while its ceiling was measured"
                found.append(f"{where}{label} of {share:.0%}: {why}")
    return found
