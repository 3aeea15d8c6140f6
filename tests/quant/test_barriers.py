"""A barrier between the threads of a CPU's kernel."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from ingot.kernels.cpu import barrier_text as barriers
from ingot.kernels.cpu.barrier_text import BARRIER_WORDS, barrier_text
from ingot.kernels.cpu.function_text import Function
from ingot.kernels.cpu.llvm_module import compiled

pytestmark = pytest.mark.usefixtures("cpu_kernels")
ROUNDS = 200


def late_sums() -> str:
    """Each round thread 0 is late, then writes its number; all others read it after the barrier."""
    f = Function("define void @kernel(ptr %args, i64 %thread, i64 %threads)")
    count, shared, sums = (f.word("%args", number, "ptr") for number in range(3))
    first = f.let("icmp eq i64 %thread, 0")
    own = f.at(sums, "%thread", 8)
    with f.loop("1", str(ROUNDS + 1)) as number:
        with f.when(first):
            with f.loop("0", "2000") as wait:
                f.add(f"store volatile i64 {wait}, ptr {own}, align 8")
            f.add(f"store volatile i64 {number}, ptr {shared}, align 8")
        f.add(f"call void @meet(ptr {count}, i64 %threads)")
        read = f.let(f"load volatile i64, ptr {shared}, align 8")
        total = f.let(f"add i64 {f.let(f'load i64, ptr {f.at(own, 16, 8)}, align 8')}, {read}")
        f.add(f"store i64 {total}, ptr {f.at(own, 16, 8)}, align 8")
        f.add(f"call void @meet(ptr {count}, i64 %threads)")
    return "\n".join((str(f), "attributes #0 = { nounwind }", barrier_text()))


def cpu_seconds(text: str, threads: int) -> float:
    """What the quickest of three launches takes of a processor's time, by threads that share one."""
    seconds = []

    def run() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread, and of those that it starts
        launch = compiled(text)
        for _ in range(3):
            places = [torch.zeros(64, dtype=torch.int64) for _ in range(3)]
            before = time.process_time()
            launch([place.data_ptr() for place in places], threads)
            seconds.append(time.process_time() - before)

    own = threading.Thread(target=run)
    own.start()
    own.join()
    return min(seconds)


@pytest.mark.parametrize("sleeps_at_once", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_thread_goes_on_before_all_have_come(
    threads: int, sleeps_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_PAUSES", "_YIELDS") if sleeps_at_once else ():
        monkeypatch.setattr(barriers, name, 0)
    count, shared = torch.zeros(BARRIER_WORDS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    sums = torch.zeros(32, dtype=torch.int64)
    launch = compiled(late_sums())
    launch([count.data_ptr(), shared.data_ptr(), sums.data_ptr()], threads)
    assert sums[16 : 16 + threads].tolist() == [ROUNDS * (ROUNDS + 1) // 2] * threads
    assert count.tolist() == [2 * ROUNDS * threads, 0]


def test_threads_that_share_a_processor_give_it_to_each_other() -> None:
    """Each barrier takes some 2 µs per thread, not the 40 µs and more that a wait to its end takes."""
    assert cpu_seconds(late_sums(), 6) / (2 * ROUNDS * 6) < 8e-6
