"""Long prompts beside decodes take turns, and short ones pass those that wait."""

from __future__ import annotations

import random

import pytest

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.scheduling.scheduler import Chunking, Scheduler
from tests.unit import test_layered_chunk
from tests.unit.fake_executor import check_blocks, check_empty, check_step, fake_executor
from tests.unit.test_layered_chunk import LAYERS, chunking, layers
from tests.unit.test_scheduler import request, run, shares

SEVEN = [f"long{i}" for i in range(7)]
TURN = 1 + 6 * LAYERS  # steps of a prompt of 30: its first tokens, five chunks of four and one of 4, its last


def scheduler(blocks: int = 400, beyond: int = 12) -> Scheduler:
    """One request decodes, and goes on."""
    made = test_layered_chunk.scheduler(blocks, beyond)
    made.running[0].max_total_tokens = 10**6
    return made


def names(requests: object) -> list[str]:
    return [r.request_id for r in requests]  # type: ignore[attr-defined]


def add_long(s: Scheduler, *ids: str, length: int = 30) -> list[Request]:
    made = [request(name, length, output=2, first=1000 * (i + 1)) for i, name in enumerate(ids)]
    for one in made:
        s.add(one)
    return made


def steps_until(s: Scheduler, name: str) -> int:
    """Steps until a request has a share, that one included."""
    return next(n for n in range(1, 3000) if name in [share for share, *_ in shares(run(s))])


class TestPlaces:
    def test_a_short_one_passes_seven_long_ones(self) -> None:
        """Which would fill the batch."""
        s = scheduler()
        add_long(s, *SEVEN)
        s.add(request("chat", 3, first=500))
        assert shares(run(s)) == [("short", 3, 1), ("long0", 0, 5), ("chat", 0, 3)]
        assert names(s.running) == ["short", "long0", "chat"]
        assert names(s.waiting) == SEVEN[1:]

    def test_a_later_short_prompt_passes_too(self) -> None:
        s = scheduler()
        add_long(s, *SEVEN)
        for _ in range(40):
            run(s)
        s.add(request("chat", 3, first=500))
        assert steps_until(s, "chat") == 1

    def test_those_that_wait_hold_no_blocks(self) -> None:
        s = scheduler()
        long = add_long(s, *SEVEN)
        for _ in range(10):
            run(s)
            assert not any(r.blocks or r.num_computed for r in long[1:])

    def test_a_full_batch_admits_no_request(self) -> None:
        s = scheduler()
        s.max_batch_size = 2
        add_long(s, "a", "b")
        s.add(request("chat", 3, first=500))
        run(s)
        assert names(s.running) == ["short", "a"]
        assert names(s.waiting) == ["b", "chat"]


class TestTurns:
    def test_each_begins_when_the_one_before_has_its_last_token(self) -> None:
        """In the order of submission, in as many steps as it takes alone."""
        s = scheduler()
        add_long(s, *SEVEN)
        entered = {}
        for number in range(7 * TURN + 10):
            for name, start, _ in shares(run(s)):
                if start == 0:
                    entered[name] = number
        assert entered == {name: TURN * i for i, name in enumerate(SEVEN)}

    def test_endless_short_prompts_do_not_starve_a_long_one(self) -> None:
        """They take every place that is free, and blocks that the long prompt needs not."""
        s = scheduler(blocks=24)
        s.running[0].max_total_tokens = 20
        long = add_long(s, *SEVEN)
        done: list[str] = []
        for number in range(12 * TURN):
            while len(s.waiting) < 12:
                s.add(request(f"chat{number}.{len(s.waiting)}", 3, output=9, first=40 * number))
            run(s)
            done += [r.request_id for r in long if r.output_ids and r.request_id not in done]
        assert done == SEVEN

    def test_a_free_place_is_a_long_ones_if_it_is_its_turn(self) -> None:
        """It was submitted first."""
        s = scheduler()
        s.max_batch_size = 3
        first, _ = add_long(s, "a", "b")
        chats = [request(f"chat{i}", 3, first=500 + 10 * i) for i in range(3)]
        for chat in chats:
            s.add(chat)
        run(s)
        assert names(s.running) == ["short", "a", "chat0"]
        s.finish(chats[0])
        run(s)
        assert names(s.running) == ["short", "a", "chat1"]
        s.finish(first)
        run(s)
        assert names(s.running) == ["short", "chat1", "b"]
        assert names(s.waiting) == ["chat2"]

    def test_without_decodes_they_enter_as_ever(self) -> None:
        s = scheduler()
        s.finish(s.running[0])
        s.token_budget = 40
        add_long(s, "a", "b", "c")
        s.add(request("chat", 3, first=500))
        assert shares(run(s)) == [("a", 0, 30), ("b", 0, 10)]
        assert names(s.waiting) == ["c", "chat"]
        step = run(s)
        assert ([shares(step)[0], layers(step)]) == [("a", 30, 1), ("b", 10, 4, 0, 1)]
        assert names(s.running) == ["b", "chat"]

    def test_the_wait_ends_when_decodes_end(self) -> None:
        s = scheduler()
        s.token_budget = 40
        add_long(s, "a", "b", "c")
        run(s)
        s.finish(s.running[0])
        assert shares(run(s)) == [("a", 5, 25), ("b", 0, 15)]

    def test_readers_and_prompts_with_one_chunk_wait_for_no_turn(self) -> None:
        s = scheduler(beyond=0)
        add_long(s, "a")
        s.add(request("whole", 5, first=200))
        s.add(request("one more", 6, first=300))
        s.add(request("read", 20, first=400, all_hidden=True))
        s.add(request("long", 7, first=500))
        step = run(s)
        assert shares(step)[1:] == [("a", 0, 5), ("whole", 0, 5), ("one more", 0, 5), ("read", 0, 5)]
        assert names(s.waiting) == ["long"]

    def test_a_known_beginning_makes_a_prompt_short(self) -> None:
        """And a prompt that waited makes use of what was computed meanwhile."""
        s = scheduler()
        s.cache.prefix_reuse = True
        s.add(request("chat", 30, output=2))
        while any(r.request_id == "chat" for r in [*s.running, *s.waiting]):
            run(s)
        add_long(s, "a", "b")
        again = [request(f"a{i}", 30, first=1000) for i in range(3)]
        for one in again:
            s.add(one)
        s.add(request("chat again", 32))
        step = run(s)
        assert shares(step)[1:] == [("a", 0, 5), ("chat again", 28, 4)]
        assert names(s.waiting) == ["b", "a0", "a1", "a2"]
        (more,) = [request("chat with much more", 60)]
        s.add(more)
        run(s)
        assert more in s.waiting
        assert not more.blocks, "it may know its beginning, and holds none of it"
        s.finish(more)
        while "a2" not in [name for name, *_ in shares(step)]:
            step = run(s)
        assert [share for share in shares(step) if share[0][:1] == "a"] == [
            (f"a{i}", 28, 2) for i in range(3)
        ]


class TestThoseThatLeave:
    def test_a_cancelled_one_that_waits(self) -> None:
        s = scheduler()
        long = add_long(s, "a", "b", "c")
        run(s)
        s.finish(long[1])
        assert names(s.waiting) == ["c"]
        assert steps_until(s, "c") == TURN

    def test_the_last_one_that_is_cancelled(self) -> None:
        s = scheduler()
        long = add_long(s, "a", "b")
        run(s)
        for one in [*long, s.running[0]]:
            s.finish(one)
        assert not s.has_work
        assert s.schedule() == ScheduledBatch()

    def test_a_preempted_one_has_its_turn_again(self) -> None:
        """Before those that have not begun."""
        s = scheduler()
        a, _, _ = add_long(s, "a", "b", "c")
        run(s)
        s._preempt(a, ScheduledBatch())
        assert names(s.waiting) == ["a", "b", "c"]
        assert shares(run(s))[1] == ("a", 0, 5)

    def test_a_preempted_one_whose_turn_is_over_waits_before_the_others(self) -> None:
        """It has begun to answer, and another long prompt is in flight."""
        s = scheduler()
        a, b, c = (request(name, 30, first=1000 * (i + 1)) for i, name in enumerate("abc"))
        s.add(a)
        while not a.output_ids:
            run(s)
        s.add(b)
        s.add(c)
        run(s)
        assert names(s.running) == ["short", "a", "b"]
        s._preempt(a, ScheduledBatch())
        run(s)
        assert names(s.running) == ["short", "b"]
        assert names(s.waiting) == ["a", "c"]

    def test_a_preempted_stream_goes_on_before_a_long_one_begins(self) -> None:
        s = scheduler()
        a, _ = add_long(s, "a", "b")
        s.add(request("chat", 3, first=500))
        run(s)
        chat = s.running[2]
        s._preempt(chat, ScheduledBatch())
        s.finish(a)
        step = run(s)
        assert [name for name, *_ in shares(step)] == ["short", "chat", "b"]
        assert names(s.running) == ["short", "chat", "b"]

    def test_a_long_prompt_that_does_not_fit_is_not_passed_in_its_turn(self) -> None:
        """Else short ones might take its blocks forever."""
        s = scheduler(blocks=12)
        a, _ = add_long(s, "a", "b")
        chat = request("chat", 12, first=500)
        s.add(chat)
        run(s)
        assert names(s.running) == ["short", "a", "chat"]
        s.finish(a)
        s.add(request("late", 3, first=700))
        run(s)
        assert names(s.waiting) == ["b", "late"]
        s.finish(chat)
        run(s)
        assert names(s.running) == ["short", "b", "late"]

    def test_short_ones_leave_it_its_blocks(self) -> None:
        s = scheduler(blocks=10)
        (a,) = add_long(s, "a")
        run(s)
        assert (len(a.blocks), s.cache.num_free) == (8, 1)
        s.add(request("chat", 6, first=500))
        run(s)
        assert names(s.waiting) == ["chat"]


PROMPTS = [[1 + (i * i + n) % 20 for i in range(n)] for n in (30, 26, 2, 34, 3, 28, 40, 1)]


def answers(chunks: Chunking | None, run_ahead: bool, blocks: int, abort: bool) -> dict[str, list[int]]:
    """Of prompts that come one after another beside a stream; of two that are cancelled, nothing."""
    executor, _ = fake_executor(blocks, max_batch_size=4, run_ahead=run_ahead, chunking=chunks)
    executor.add("stream", [5], SamplingParams(max_new_tokens=45, ignore_eos=True))
    found: dict[str, list[int]] = {}
    waiting = list(enumerate(PROMPTS))
    for count in range(600):
        if waiting and count % 2:
            index, ids = waiting.pop(0)
            executor.add(f"r{index}", ids, SamplingParams(max_new_tokens=6, seed=index, ignore_eos=True))
        if abort and count in (8, 14):
            executor.abort("r3" if count == 8 else "r0")
            check_blocks(executor)
        if executor.has_work:
            for update in executor.step():
                found.setdefault(update.request_id, []).extend(update.token_ids)
            check_blocks(executor)
    check_empty(executor)
    return {name: ids for name, ids in found.items() if not (abort and name in ("r0", "r3"))}


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("blocks", [64, 13])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_tokens_are_the_same(run_ahead: bool, blocks: int, abort: bool) -> None:
    """As without turns; in a small cache requests are preempted."""
    expected = answers(None, run_ahead=False, blocks=64, abort=abort)
    assert answers(chunking(), run_ahead, blocks, abort) == expected
    assert len(expected) == len(PROMPTS) + 1 - 2 * abort


@pytest.mark.parametrize("seed", range(6))
def test_no_request_starves_in_a_small_cache(seed: int) -> None:
    """Long and short ones by chance, more than the batch and the cache hold: all end, long ones in order."""
    rng = random.Random(seed)
    executor, runner = fake_executor(
        13, max_batch_size=rng.choice((2, 3, 5)), token_budget=rng.choice((8, 13, 64)), chunking=chunking(8)
    )
    ends: list[str] = []
    lengths = [rng.choice((1, 2, 3, 5, 30, 37)) for _ in range(40)]
    for index, length in enumerate(lengths):
        params = SamplingParams(max_new_tokens=rng.choice((1, 4, 9)), ignore_eos=True)
        executor.add(f"r{index}", [1 + (i + index) % 20 for i in range(length)], params)
    for _ in range(4000):
        if not executor.has_work:
            break
        ends += [update.request_id for update in executor.step() if update.finish_reason is not None]
        check_blocks(executor)
        check_step(executor, runner.steps[-1])
    assert sorted(ends) == sorted(f"r{i}" for i in range(40))
    check_empty(executor)
