"""The text of a barrier between the threads of a kernel, in LLVM's language.

A thread that waits soon offers its processor to others: where there are fewer processors than threads, or
other programs use them, one of those others is what it waits for. On an idle machine the offer returns at
once, so that it waits for some 25 µs before it sleeps: waking up takes longer than a product.

    text = barrier_text()           # void meet(place, threads); place: ``BARRIER_WORDS`` int64, 0 at first
"""

from __future__ import annotations

import platform

BARRIER_WORDS = 2  # how often a thread has come; how many sleep
_PAUSES = 50  # about 1 µs
_YIELDS = 64
_WAIT, _WAKE = 128, 129  # of a futex within the process


def barrier_text() -> str:
    """A function that returns once all threads have called it as often."""
    arm = platform.machine() in ("aarch64", "arm64")
    pause, futex, sched_yield = ("yield", 98, 124) if arm else ("pause", 202, 24)
    return f"""declare i64 @syscall(i64, ...)
define internal void @meet(ptr %count, i64 %threads) noinline {{
entry:
  %sleepers = getelementptr i8, ptr %count, i64 8
  %before = atomicrmw add ptr %count, i64 1 seq_cst
  %rounds = udiv i64 %before, %threads
  %next = add i64 %rounds, 1
  %all = mul i64 %next, %threads
  %come = add i64 %before, 1
  %last = icmp eq i64 %come, %all
  br i1 %last, label %look, label %wait
look:
  %asleep = load atomic i64, ptr %sleepers seq_cst, align 8
  %any = icmp ne i64 %asleep, 0
  br i1 %any, label %wake, label %done
wake:
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %count, i32 {_WAKE}, i32 65535, ptr null, ptr null, i32 0)
  br label %done
wait:
  %tries = phi i64 [ 0, %entry ], [ %more, %pause ], [ %more, %offer ], [ %more, %sleep ]
  %now = load atomic i64, ptr %count seq_cst, align 8
  %met = icmp uge i64 %now, %all
  br i1 %met, label %done, label %idle
idle:
  %more = add i64 %tries, 1
  %soon = icmp ult i64 %tries, {_PAUSES}
  br i1 %soon, label %pause, label %late
pause:
  call void asm sideeffect "{pause}", ""()
  br label %wait
late:
  %later = icmp ult i64 %tries, {_PAUSES + _YIELDS}
  br i1 %later, label %offer, label %sleep
offer:
  call i64 (i64, ...) @syscall(i64 {sched_yield})
  br label %wait
sleep:
  atomicrmw add ptr %sleepers, i64 1 seq_cst
  %low = trunc i64 %now to i32
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %count, i32 {_WAIT}, i32 %low, ptr null, ptr null, i32 0)
  atomicrmw sub ptr %sleepers, i64 1 seq_cst
  br label %wait
done:
  ret void
}}"""
