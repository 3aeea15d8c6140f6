"""How the one thread of an LLM ends, and what is left open then."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ingot import LLM
from ingot.config.runtime import RuntimeConfig
from tests.e2e.mixed import GREEDY

pytestmark = pytest.mark.timeout(120)


def test_a_dropped_llm_ends_its_thread(folders: dict[str, Path]) -> None:
    before = set(threading.enumerate())
    llm = LLM(folders["llama"], "cpu", max_seq_len=64, runtime=RuntimeConfig(cache_tokens=256))
    llm.generate([1, 2, 3], GREEDY)
    (own,) = set(threading.enumerate()) - before
    del llm
    assert not own.is_alive()


def test_a_stream_that_outlives_the_loop_closes_quietly(folders: dict[str, Path]) -> None:
    """As one that is held in a global when the process ends."""
    llm = LLM(folders["llama"], "cpu", max_seq_len=64, runtime=RuntimeConfig(cache_tokens=256))
    stream = llm.stream([1, 2, 3], GREEDY)
    next(stream)
    loop = llm._calls.loop
    loop._orders.put(None)
    loop._thread.join()
    assert not loop._thread.is_alive()
    stream.close()  # type: ignore[attr-defined]
    assert loop._orders.qsize() == 1  # the order to end its call: left there, and nobody waits for it
