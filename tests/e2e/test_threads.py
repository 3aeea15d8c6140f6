"""One LLM under many threads and tasks: equal answers, and a cancelled caller ends only its own requests."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.errors import EngineError, RequestError
from tests.e2e.mixed import GREEDY, SAMPLED, Make
from tests.e2e.watch import before_steps, check_idle, watch
from tests.tiny_models import random_ids

THREADS = 8
LONG = GREEDY.replace(max_new_tokens=100)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def llm(make: Make) -> Iterator[LLM]:
    """A LLaMA of two layers whose cache holds 2048 tokens, 8 requests at once; nothing is left in it."""
    llm = make("llama")
    yield llm
    assert settled(llm)
    check_idle(llm)


def settled(llm: LLM) -> bool:
    """Wait until the orders that were given so far are carried out."""
    llm._calls.loop.between_steps(lambda: None)
    return True


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """The results of ``work(0)``, ``work(1)`` …, each in a thread, started together."""
    together = threading.Barrier(count)

    def run(index: int) -> Any:
        together.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return [job.result() for job in [pool.submit(run, i) for i in range(count)]]


def requests(thread: int, answers: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of many lengths, of which some share a beginning; greedy and drawn."""
    begin = random_ids(20, seed=7)
    found = []
    for i in range(answers):
        seed = 1000 * thread + i
        prompt = (begin if i % 3 == 0 else []) + random_ids(1 + seed * 7 % 30, seed=seed)
        values = GREEDY if i % 2 else SAMPLED.replace(seed=seed)
        found.append((prompt, values.replace(max_new_tokens=1 + seed * 5 % 7)))
    return found


@pytest.mark.parametrize("answers", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_answers_are_those_of_serial_calls(llm: LLM, answers: int) -> None:
    asked = [requests(thread, answers) for thread in range(THREADS)]
    serial = [[llm.generate(p, v)[0].token_ids for p, v in one] for one in asked]
    with watch(llm) as steps:
        found = in_threads(lambda t: [llm.generate(p, v)[0].token_ids for p, v in asked[t]])
    assert found == serial
    assert steps.largest_batch == THREADS
    alone = sum(values.max_new_tokens or 0 for one in asked for _, values in one)
    assert len(steps.steps) < alone / 3, "threads share steps"


def test_streams_in_threads_are_calls(llm: LLM) -> None:
    prompts = [random_ids(5 + i, seed=i) for i in range(THREADS)]
    expected = [llm.generate(p, SAMPLED)[0].token_ids for p in prompts]
    found = in_threads(lambda t: [i for piece in llm.stream(prompts[t], SAMPLED) for i in piece.token_ids])
    assert found == expected


def test_chats_from_two_threads(tiny: Path) -> None:
    talker = LLM(tiny, "cpu")
    talks = [[{"role": "user", "content": f"number {i}"}] for i in range(20)]
    expected = [talker.chat(talk).text for talk in talks]
    found = in_threads(lambda t: [talker.chat(talk).text for talk in talks[t::2]], 2)
    assert found == [expected[0::2], expected[1::2]]
    assert all(expected)


def test_every_kind_of_call_concurrently(llm: LLM) -> None:
    """Logits, likelihoods, taps, warm-up and refused requests while others generate."""
    ids, short = random_ids(40, seed=3), GREEDY.replace(max_new_tokens=4)
    logits, likely = llm.logits(ids), llm.log_likelihood(ids)
    answer = llm.generate(ids, LONG.replace(max_new_tokens=80))[0].token_ids

    def work(kind: int) -> None:
        for _ in range(4):
            if kind == 0:
                assert torch.allclose(llm.logits(ids), logits, rtol=1e-5, atol=1e-5)
            elif kind == 1:
                assert torch.allclose(llm.log_likelihood(ids), likely, rtol=1e-5, atol=1e-5)
            elif kind in (2, 3):
                with llm.tap("layers.*") as seen:
                    assert llm.generate(ids, short)[0].token_ids == answer[:4]
                assert all(len(rows) >= 43 for rows in seen.values()), "every token, cached or not"
            elif kind == 4:
                llm.warm_up([1])
                with pytest.raises(RequestError):
                    llm.generate([-1], short)
            else:
                assert llm.generate(ids, LONG.replace(max_new_tokens=80))[0].token_ids == answer

    in_threads(work)
    runner = llm.executor.runner
    assert (runner.eager, llm.executor.blocks.prefix_reuse) == (False, True), "no tap is left"


def test_taps_may_close_in_any_order(llm: LLM) -> None:
    runner = llm.executor.runner
    first, second = llm.tap("norm"), llm.tap("layers.0")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert runner.eager
    second.__exit__(None, None, None)
    assert not runner.eager


@pytest.mark.slow
def test_abandoned_streams_do_not_block(make: Make) -> None:
    """As many as the batch holds are begun and held: a call from another thread still ends."""
    llm = make("llama", batch=4)
    prompts = [random_ids(9, seed=i) for i in range(5)]
    *expected, last = (llm.generate(p, LONG)[0].token_ids for p in prompts)
    held = [llm.stream(p, LONG) for p in prompts[:4]]
    begun = [next(stream) for stream in held]
    assert in_threads(lambda _: llm.generate(prompts[4], LONG)[0].token_ids, 1) == [last]
    del held[2:]
    gc.collect()
    for piece, stream, ids in zip(begun, held, expected, strict=False):
        assert [*piece.token_ids, *(t for p in stream for t in p.token_ids)] == ids
    check_idle(llm)


def test_a_stream_that_is_not_advanced_does_not_run(llm: LLM) -> None:
    stream = llm.stream(random_ids(9, seed=1), LONG)
    next(stream)
    with watch(llm) as steps:
        time.sleep(0.1)
    assert not steps.steps
    stream.close()  # type: ignore[attr-defined]
    check_idle(llm)


def test_a_stream_dropped_in_another_thread_gives_its_blocks_back(llm: LLM) -> None:
    streams = [llm.stream(random_ids(9, seed=i), LONG) for i in range(4)]
    for stream in streams:
        next(stream)
    del stream
    in_threads(lambda _: streams.pop() and None, 4)
    assert not llm.executor.has_work


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; pytest's worker processes ignore it otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_calls_of_its_thread_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives during a step that serves two threads."""
    prompt, other = random_ids(9, seed=1), random_ids(9, seed=2)
    expected = llm.generate(other, LONG)[0].token_ids
    main, steps = threading.main_thread().ident, []

    def interrupting(step: Any) -> None:
        steps.append(len(step.requests))
        if 3 not in steps and len(steps) < 50:
            time.sleep(0.05)  # the other thread and this one get their calls in, on a busy machine too
        if len(step.requests) == 3 and steps.count(3) == 5:
            signal.pthread_kill(main, signal.SIGINT)  # type: ignore[arg-type]

    before_steps(llm, monkeypatch, interrupting)
    beside: list[list[int]] = []
    thread = threading.Thread(target=lambda: beside.append(llm.generate(other, LONG)[0].token_ids))
    held = llm.stream(random_ids(3, seed=3), LONG)
    first = next(held)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, LONG)
    thread.join()
    assert beside == [expected]
    assert steps[-1] <= 2
    rest = sum(len(piece.token_ids) for piece in held)
    assert len(first.token_ids) + rest == 100, "the thread's other streams go on"


def test_a_request_without_numbers_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = random_ids(9, seed=1), random_ids(9, seed=2)
    expected = llm.generate(good, LONG)[0].token_ids
    run = llm.executor.runner.run

    def spoiled(step: Any) -> torch.Tensor:
        logits = run(step).clone()
        rows = [item.request for item in step.requests if item.samples]
        for row, request in enumerate(rows):
            if request.prompt_ids == bad and request.num_tokens > 20:
                logits[row] = float("nan")
        return logits

    monkeypatch.setattr(llm.executor.runner, "run", spoiled)

    def work(thread: int) -> Any:
        if thread:
            with pytest.raises(EngineError, match="not numbers"):
                llm.generate(bad, LONG)
            return None
        return llm.generate(good, LONG)[0].token_ids

    assert in_threads(work, 3)[0] == expected


def test_a_failed_step_reaches_every_waiting_caller(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_ids(9, seed=1)
    expected = llm.generate(prompt, GREEDY)[0].token_ids

    def failing(step: Any) -> None:
        if len(step.requests) == 4:
            raise RuntimeError("a planted failure")

    async def coroutine() -> None:
        await llm.agenerate(prompt, LONG)

    before_steps(llm, monkeypatch, failing)
    calls = [
        lambda: llm.generate(prompt, LONG),
        lambda: list(llm.stream(prompt, LONG)),
        lambda: [None for _ in range(99) if llm.generate(prompt, LONG)],
        lambda: asyncio.run(coroutine()),
    ]

    def work(thread: int) -> None:
        with pytest.raises(RuntimeError, match="planted"):
            calls[thread]()

    in_threads(work, 4)
    monkeypatch.undo()
    assert llm.generate(prompt, GREEDY)[0].token_ids == expected


def test_tasks_share_steps_and_leave_alone(llm: LLM) -> None:
    """gather, streams side by side, a cancelled call, a cancelled reader and a reader that breaks off."""
    prompts = [random_ids(9 + i, seed=i) for i in range(8)]
    expected = [llm.generate(p, LONG)[0].token_ids for p in prompts]

    async def read(prompt: list[int], most: int = 1000) -> list[int]:
        ids: list[int] = []
        async for piece in llm.astream(prompt, LONG):
            ids += piece.token_ids
            if len(ids) >= most:
                break
        return ids

    async def leave(task: asyncio.Task[Any]) -> None:
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> list[Any]:
        with watch(llm) as steps:
            found = await asyncio.gather(
                llm.agenerate(prompts[:2], LONG),
                *map(read, prompts[2:5]),
                leave(asyncio.create_task(llm.agenerate(prompts[5], LONG))),  # type: ignore[arg-type]
                leave(asyncio.create_task(read(prompts[6]))),
                read(prompts[7], most=6),
            )
            settled(llm)
        assert steps.largest_batch == 8
        return found

    found = asyncio.run(main())
    assert [output.token_ids for output in found[0]] == expected[:2]
    assert found[1:4] == expected[2:5]
    assert found[6] == expected[7][:6]


def test_a_cancelled_task_ends_its_request_before_the_next_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, steps = threading.Event(), []

    def held(step: Any) -> None:
        steps.append(step)
        assert go.wait(60)

    async def main() -> None:
        task = asyncio.create_task(llm.agenerate([1, 2, 3], LONG))  # type: ignore[arg-type]
        while not steps:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        settled(llm)
        check_idle(llm)

    before_steps(llm, monkeypatch, held)
    asyncio.run(main())
    assert len(steps) == 1


def test_an_event_loop_that_closes_leaves_nothing(llm: LLM) -> None:
    """A stream that outlives its event loop: the loop of steps finds no listener."""
    kept: list[AsyncIterator[Any]] = []

    async def begin() -> None:
        kept.append(llm.astream(random_ids(9, seed=1), LONG))
        await anext(kept[0])

    events = asyncio.new_event_loop()
    events.run_until_complete(begin())
    events.close()
    assert len(llm.generate(random_ids(9, seed=2), LONG)[0].token_ids) == 100
    assert settled(llm)
    check_idle(llm)


def test_a_fork_cannot_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._calls.loop._thread, "is_alive", lambda: False)  # as a forked child finds it
    with pytest.raises(EngineError, match="fork"):
        llm.generate([1, 2, 3], GREEDY)
    monkeypatch.undo()


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_not_sent_to_another_process(send: Callable[[object], object], llm: LLM) -> None:
    with pytest.raises(
        EngineError, match="cannot be copied or sent to another process; to fix: make it there"
    ):
        send(llm.generate if send is pickle.dumps else llm)


def test_steps_use_as_many_cpu_threads_as_the_caller_has_set(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    before_steps(llm, monkeypatch, lambda step: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            llm.generate([1, 2, 3], GREEDY.replace(max_new_tokens=1))
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


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
    assert loop._orders.qsize() == 0  # its call ended with the loop
    loop.settle(stream.close)  # type: ignore[attr-defined]
    assert loop._orders.qsize() == 1  # for nobody


def test_a_call_of_many_prompts_that_are_read_waits_for_the_last(llm: LLM) -> None:
    """More than a step has requests: they end in different steps."""
    prompts = [random_ids(3 + i, i) for i in range(12)]
    alone = [llm.embed(prompt)[0] for prompt in prompts]
    assert torch.allclose(llm.embed(prompts), torch.stack(alone), atol=1e-5)
