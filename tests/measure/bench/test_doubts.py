"""Signs that a measurement cannot be trusted."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.measure.bench.doubts import doubts


def entry(**changes: Any) -> dict[str, Any]:
    steady = {"p50": 10.0, "p90": 11.0, "p99": 11.0, "least": 9.5, "most": 11.0}
    base = {
        "batch": 8,
        "ttft_ms": steady,
        "decode_ms": steady,
        "streamed": {},
        "mbu": 0.9,
        "mfu_prefill": 0.6,
    }
    return base | changes


def test_a_quiet_machine_raises_none() -> None:
    assert doubts([entry(), entry(mbu=None, decode_ms=None), {"seconds": None, "mfu": 0.2}]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode_ms": {"least": -3.2, "most": 5.0}}, "decode time of -3.2"),
        ({"ttft_ms": {"least": 10.0, "most": 15.1}}, "TTFT from 10 to 15.1"),
        ({"mfu_prefill": 6.389}, "prefill MFU of 639%"),
        ({"mbu": 1.06}, "MBU of 106%"),
    ],
)
def test_each_sign(changes: dict[str, Any], words: str) -> None:
    (line,) = doubts([entry(**changes)])
    assert line.startswith("batch 8: ")
    assert words in line


def test_requests_of_a_load_wait_for_one_another() -> None:
    load = {"seconds": {"least": 9.0, "most": 9.3}, "ttft_ms": {"least": 1.0, "most": 900.0}, "mfu": 0.2}
    assert doubts([load]) == []
    assert doubts([load | {"seconds": {"least": 9.0, "most": 19.0}}])
