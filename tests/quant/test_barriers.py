"""A barrier between the threads of a CPU's kernel."""

from __future__ import annotations

import pytest
import torch

from ingot.kernels.cpu.barrier_text import BARRIER_WORDS, barrier_text
from ingot.kernels.cpu.function_text import Function
from ingot.kernels.cpu.llvm_module import compiled

pytestmark = pytest.mark.usefixtures("cpu_kernels")
ROUNDS = 200


@pytest.fixture(scope="module")
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


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_thread_goes_on_before_all_have_come(late_sums: str, threads: int) -> None:
    count, shared = torch.zeros(BARRIER_WORDS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    sums = torch.zeros(32, dtype=torch.int64)
    launch = compiled(late_sums)
    launch([count.data_ptr(), shared.data_ptr(), sums.data_ptr()], threads)
    assert sums[16 : 16 + threads].tolist() == [ROUNDS * (ROUNDS + 1) // 2] * threads
    assert count.tolist() == [2 * ROUNDS * threads, 0]
