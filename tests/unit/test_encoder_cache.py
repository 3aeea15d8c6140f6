"""Inputs in the scheduler: what a step encodes, who holds it, what is evicted; over no tensors."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.scheduling.encoder_cache import EncoderCache
from ingot.runtime.scheduling.inputs import Content, RequestInput
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.scheduling.scheduler import Scheduler
from tests.unit.test_scheduler import run

SIZE = 4  # of a block, of both caches
NOTHING = torch.empty(0)


def at_hand(name: str) -> Future[Content]:
    content: Future[Content] = Future()
    content.set_result(Content(NOTHING, name.encode()))
    return content


def picture(name: str, place: int, positions: int = 6) -> RequestInput:
    return RequestInput(at_hand(name), positions, place, positions)


def speech(name: str, positions: int = 6) -> RequestInput:
    return RequestInput(at_hand(name), positions)


def request(name: str, prompt: int, *inputs: RequestInput, output: int = 3, **fields: Any) -> Request:
    key = b"".join(one.digest for one in inputs if not one.tokens)
    total = prompt + output
    return Request(name, [9] * prompt, SamplingParams(), total, cache_key=key, inputs=inputs, **fields)


def scheduler(blocks: int = 64, encoder_blocks: int = 8, tokens: int = 64, budget: int = 100) -> Scheduler:
    encoders = EncoderCache(encoder_blocks, SIZE, budget)
    return Scheduler(BlockManager(blocks, SIZE), 8, tokens, encoders)


def reported(step: ScheduledBatch) -> tuple[list[tuple[str, int]], list[str]]:
    """(requests and their tokens, inputs that are encoded)."""
    shares = [(item.request.request_id, item.count) for item in step.requests]
    return shares, [job.given.digest.decode() for job in step.jobs]


def holders(s: Scheduler) -> dict[str, int]:
    assert s.encoders is not None
    return {digest.decode(): entry.holders for digest, entry in s.encoders._entries.items()}


def test_a_step_encodes_computes_prompts_and_decodes_at_once() -> None:
    s = scheduler()
    s.add(request("text", 5))
    run(s)
    s.add(request("seen", 12, picture("p", 3)))
    assert reported(run(s)) == ([("text", 1), ("seen", 12)], ["p"])
    assert holders(s) == {"p": 0}  # its placeholders are computed


def test_beyond_the_encoder_budget_a_request_computes_what_is_before_its_input() -> None:
    s = scheduler(budget=10)
    s.add(request("a", 20, picture("p", 2), picture("q", 9)))
    s.add(request("b", 8, picture("r", 0)))
    assert reported(run(s)) == ([("a", 9)], ["p"])  # b starts with its input
    assert reported(run(s)) == ([("a", 11)], ["q"])
    assert reported(run(s)) == ([("a", 1), ("b", 8)], ["r"])


def test_an_input_larger_than_the_budget_takes_a_step_s_budget_alone() -> None:
    s = scheduler(budget=2)
    s.add(request("a", 8, speech("p")))
    s.add(request("b", 8, speech("q")))
    assert reported(run(s)) == ([("a", 8)], ["p"])
    assert reported(run(s)) == ([("a", 1), ("b", 8)], ["q"])


def test_a_chunk_holds_a_picture_until_its_last_placeholder() -> None:
    s = scheduler(tokens=4)
    s.add(request("a", 13, picture("p", 3)))
    assert reported(run(s)) == ([("a", 4)], ["p"])
    assert holders(s) == {"p": 1}
    assert reported(run(s)) == ([("a", 4)], [])
    assert holders(s) == {"p": 1}  # token 8 is still to come
    assert reported(run(s)) == ([("a", 4)], [])
    assert holders(s) == {"p": 0}


def test_speech_is_held_until_its_request_ends_and_then_evicted_oldest_first() -> None:
    s = scheduler(encoder_blocks=4)
    for name in ("a", "b"):
        s.add(request(name, 4, speech(name)))
    s.add(request("c", 4, speech("c")))
    assert reported(run(s)) == ([("a", 4), ("b", 4)], ["a", "b"])  # two blocks each
    assert reported(run(s)) == ([("a", 1), ("b", 1)], [])
    assert holders(s) == {"a": 1, "b": 1}
    run(s)  # a and b end
    s.add(request("again", 5, speech("b")))
    assert reported(run(s)) == (
        [("again", 1), ("c", 4)],
        ["c"],
    )  # a is evicted; b is there, and so is a block
    assert holders(s) == {"b": 1, "c": 1}


def test_a_preempted_request_gives_its_speech_back_and_finds_it_again() -> None:
    s = scheduler(blocks=4)
    s.add(request("old", 8, speech("p"), output=9))
    s.add(request("new", 8, speech("q"), output=9))
    step = run(s)
    while not step.preempted:
        step = run(s)
    assert holders(s) == {"p": 1, "q": 0}
    s.finish(step.requests[0].request)
    assert reported(run(s)) == ([("new", 5)], [])  # of its nine tokens a block was published


def test_a_beam_holds_what_its_parent_holds() -> None:
    s = scheduler()
    parent = request("root", 4, speech("p"))
    s.add(parent)
    run(s)
    child = request("child", 4, speech("p"), output_ids=[7])
    s.fork(parent, child)
    assert holders(s) == {"p": 2}
    s.finish(parent)
    assert holders(s) == {"p": 1}
    assert reported(run(s)) == ([("child", 1)], [])


def test_blocks_are_shared_by_what_the_placeholders_stand_for() -> None:
    def reused(first: Request, second: Request) -> int:
        s = scheduler()
        for one in (first, second):
            s.add(one)
            run(s)
        return sum(a == b for a, b in zip(first.block_hashes, second.block_hashes, strict=True))

    def seen(name: str, place: int = 5) -> Request:
        return request(name + str(place), 17, picture(name, place))

    assert reused(seen("p"), seen("p")) == 4
    assert reused(seen("p"), seen("q")) == 1  # tokens 0 to 3 stand before the picture
    assert reused(seen("p"), seen("p", 6)) == 1
    assert reused(seen("p"), request("text", 17)) == 1
    assert reused(request("a", 17, speech("p")), request("b", 17, speech("q"))) == 0


def test_unreferenced_entries_are_dropped_after_a_failed_step() -> None:
    cache = EncoderCache(4, SIZE, 100)
    asking = request("a", 4, speech("p"))
    assert cache.share(asking, 4, []) == 4
    with pytest.raises(AssertionError):
        cache.clear()
    cache.release(asking)
    cache.clear()
    assert b"p" not in cache
    assert cache.share(request("b", 4, speech("q", 16)), 4, []) == 4  # all blocks are free


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_and_no_two_inputs_share_an_entry(seed: int) -> None:
    rng = random.Random(seed)
    s = scheduler(rng.choice((12, 40)), rng.choice((3, 8)), rng.choice((5, 64)), rng.choice((1, 12, 100)))
    assert s.encoders is not None
    waiting = [_random_request(rng, index) for index in range(24)]
    done = 0
    for _ in range(4000):
        if waiting and rng.random() < 0.3:
            s.add(waiting.pop())
        if not s.has_work:
            if not waiting:
                break
            continue
        _check(s, run(s))
        if s.running and rng.random() < 0.05:
            s.finish(rng.choice(s.running))
            done += 1
    assert not s.has_work
    assert not waiting
    assert set(holders(s).values()) <= {0}
    assert s.cache.num_free == s.cache.num_blocks


def _random_request(rng: random.Random, index: int) -> Request:
    if rng.random() < 0.4:
        return request(f"r{index}", rng.randint(1, 20), speech(f"s{rng.randint(0, 5)}", 9))
    place, inputs = rng.randint(0, 6), []
    for _ in range(rng.randint(0, 2)):
        inputs.append(picture(f"p{rng.randint(0, 5)}", place, 8))
        place += 8 + rng.randint(0, 3)
    return request(f"r{index}", place + rng.randint(1, 4), *inputs)


def _check(s: Scheduler, step: ScheduledBatch) -> None:
    """Whoever computes tokens that read an input has it; blocks of the cache have one owner each."""
    assert s.encoders is not None
    for item in step.requests:
        for index, given in enumerate(item.request.inputs):
            passed = given.tokens and given.end <= item.start + item.count
            if given.is_read_by(item.start, item.start + item.count) and not passed and item.request.blocks:
                entry = item.request.encoded[index]
                assert entry is s.encoders._entries[given.digest]
    blocks = [block for entry in s.encoders._entries.values() for block in entry.blocks]
    assert sorted(blocks + s.encoders._free) == list(range(s.encoders.num_blocks))
