"""Signs that a measurement cannot be trusted.

Owns what no quiet machine gives: runs far apart, times below zero, more than the ceiling. Knows no side and
no method; a record with doubts is still whole.

    for doubt in doubts(entries): print(doubt)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

FAR_APART = 1.5  # slowest run over fastest
OVER = 1.05  # of the ceiling: it varies by a few percent itself
_SHARES = {"mbu": "MBU", "mfu": "MFU", "mfu_decode": "decode MFU", "mfu_prefill": "prefill MFU"}
_TIMES = {"ttft_ms": "TTFT", "decode_ms": "decode time", "seconds": "seconds"}


def doubts(entries: Sequence[dict[str, Any]]) -> list[str]:
    """One line a sign, for the entries of one side of a latency or a throughput."""
    return [line for entry in entries for line in _of_entry(entry)]


def _of_entry(entry: dict[str, Any]) -> Iterator[str]:
    where = f"batch {entry['batch']}: " if "batch" in entry else ""
    waits = "streamed" not in entry and "ttft_ms" in entry  # requests of a load wait for one another
    for name, label in _TIMES.items():
        times = entry.get(name)
        if times is None or (name == "ttft_ms" and waits):
            continue
        least, most = times["least"], times["most"]
        if least <= 0:
            yield f"{where}{label} of {least:.3g}: longer runs took no longer; measure with more new tokens"
        elif most > FAR_APART * least:
            yield f"{where}{label} from {least:.3g} to {most:.3g}: something else disturbed the runs"
    for name, label in _SHARES.items():
        share = entry.get(name)
        if share is not None and share > OVER:
            yield f"{where}{label} of {share:.0%}: the machine was slower while its ceiling was measured"
