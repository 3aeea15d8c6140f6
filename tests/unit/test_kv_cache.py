"""Blocks: reference counts, the prefix cache, its hashes and its order of reuse."""

from __future__ import annotations

import random
from typing import Any

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.request import Request


def request(tokens: list[int], output: list[int] | None = None, **fields: Any) -> Request:
    return Request("r", tokens, SamplingParams(), 1000, output_ids=output or [], **fields)


def fill(cache: BlockManager, r: Request, computed: int | None = None) -> Request:
    """Reuse what is known, compute the rest and publish it."""
    cache.reuse_prefix(r)
    assert cache.grow(r, r.num_tokens if computed is None else computed)
    r.num_computed = r.num_tokens if computed is None else computed
    cache.publish(r)
    return r


def test_grow_is_all_or_nothing() -> None:
    cache = BlockManager(4, 4)
    a, b = request([1] * 12), request([2] * 9)
    assert cache.grow(a, 5)
    assert len(a.blocks) == 2
    assert cache.grow(a, 8)
    assert len(a.blocks) == 2
    assert not cache.grow(b, 9)
    assert b.blocks == []
    assert cache.num_free == 2
    assert cache.grow(b, 8)
    assert cache.num_free == 0
    assert set(a.blocks).isdisjoint(b.blocks)
    cache.release(a)
    assert cache.num_free == 2
    assert a.blocks == []
    assert a.num_computed == 0


def test_a_released_prefix_is_found_again_but_never_the_last_token() -> None:
    cache = BlockManager(8, 4)
    a = fill(cache, request(list(range(12))))
    blocks = list(a.blocks)
    cache.release(a)
    for length, reused in ((12, 2), (13, 3), (9, 2), (8, 1), (5, 1), (4, 0), (1, 0)):
        r = request(list(range(length)))
        assert cache.reuse_prefix(r) == reused * 4 == r.num_computed
        assert r.blocks == blocks[:reused]
        cache.release(r)
    assert cache.num_free == 8


def test_a_block_in_use_is_shared() -> None:
    cache = BlockManager(8, 4)
    a = fill(cache, request(list(range(10))))
    b = request([*range(8), 50, 51])
    assert cache.reuse_prefix(b) == 8
    assert b.blocks == a.blocks[:2]
    cache.release(a)
    assert cache.num_free == 6, "b still holds two"
    cache.release(b)
    assert cache.num_free == 8


def test_only_full_computed_blocks_are_published() -> None:
    cache = BlockManager(8, 4)
    fill(cache, request(list(range(12))), computed=7)
    assert cache.reuse_prefix(request(list(range(12)))) == 4


def test_outputs_are_found_as_well_as_prompts() -> None:
    cache = BlockManager(8, 4)
    a = fill(cache, request([1, 2, 3], [4, 5, 6, 7, 8]))
    cache.release(a)
    assert cache.reuse_prefix(request([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8
    again = request([1, 2, 3], [4, 5, 6, 7, 8])
    assert cache.reuse_prefix(again) == 4


def test_the_hash_depends_on_the_key_and_on_all_blocks_before() -> None:
    cache = BlockManager(16, 4)
    fill(cache, request(list(range(12)), cache_key=b"a"))
    assert cache.reuse_prefix(request(list(range(12)), cache_key=b"b")) == 0
    assert cache.reuse_prefix(request([9, *range(1, 12)], cache_key=b"a")) == 0
    assert cache.reuse_prefix(request([*range(4), 9, *range(5, 12)], cache_key=b"a")) == 4
    swapped = request([4, 5, 6, 7, 0, 1, 2, 3, 8, 9], cache_key=b"a")
    assert cache.reuse_prefix(swapped) == 0
    assert cache.reuse_prefix(request(list(range(12)), cache_key=b"a")) == 8


def test_the_least_recently_used_block_is_evicted_first_and_ends_before_beginnings() -> None:
    cache = BlockManager(6, 4)
    old = fill(cache, request([*range(100, 109)]))
    new = fill(cache, request([*range(200, 209)]))
    cache.release(old)
    cache.release(new)
    fresh = request([0] * 4)
    assert cache.grow(fresh, 4)
    assert cache.grow(fresh, 8)
    for start, reused in ((100, 4), (200, 8)):  # each is the most recently used then
        probe = request([*range(start, start + 9)])
        assert cache.reuse_prefix(probe) == reused
        cache.release(probe)
    assert cache.grow(fresh, 12)  # new's open block
    assert cache.grow(fresh, 16)  # old's beginning, used before new's
    assert cache.reuse_prefix(request([*range(100, 109)])) == 0
    assert cache.reuse_prefix(request([*range(200, 209)])) == 8


def test_an_overwritten_block_is_forgotten() -> None:
    cache = BlockManager(2, 4)
    cache.release(fill(cache, request(list(range(8)))))
    assert cache.grow(request([7] * 8), 8)
    assert cache.reuse_prefix(request(list(range(9)))) == 0
    assert cache._by_hash == {}
    assert cache._hash_of == {}


def test_reuse_can_be_turned_off() -> None:
    cache = BlockManager(8, 4, prefix_reuse=False)
    cache.release(fill(cache, request(list(range(12)))))
    assert cache.reuse_prefix(request(list(range(12)))) == 0


def test_a_request_for_all_logits_reuses_nothing() -> None:
    cache = BlockManager(8, 4)
    fill(cache, request(list(range(12))))
    assert cache.reuse_prefix(request(list(range(12)), all_logits=True)) == 0


def test_two_equal_prompts_computed_side_by_side_keep_their_own_blocks() -> None:
    cache = BlockManager(8, 4)
    a, b = request(list(range(8))), request(list(range(8)))
    for r in (a, b):
        assert cache.grow(r, 8)
        r.num_computed = 8
    cache.publish(a)
    cache.publish(b)
    cache.release(b)
    cache.release(a)
    assert cache.num_free == 8
    assert cache.reuse_prefix(request(list(range(9)))) == 8


def test_fork_shares_full_blocks_and_copies_the_open_one() -> None:
    cache = BlockManager(8, 4)
    parent = fill(cache, request(list(range(10))))
    child = request(list(range(10)), [50])
    copy = cache.fork(parent, child)
    assert copy == (parent.blocks[2], child.blocks[2])
    assert child.blocks[:2] == parent.blocks[:2]
    assert child.blocks[2] != parent.blocks[2]
    assert child.num_computed == 10
    cache.release(parent)
    assert cache.num_free == 5
    cache.release(child)
    assert cache.num_free == 8


def test_siblings_are_known_by_their_own_tokens() -> None:
    cache = BlockManager(8, 4)
    parent = fill(cache, request(list(range(6))))
    children = [request(list(range(6)), [token, token]) for token in (50, 60)]
    for child in children:
        cache.fork(parent, child)
    for child in children:
        child.num_computed = 8
        cache.publish(child)
    for child in children:
        probe = request([*range(6), *child.output_ids, 0])
        assert cache.reuse_prefix(probe) == 8
        assert probe.blocks == child.blocks


def test_fork_at_a_block_end_copies_nothing() -> None:
    cache = BlockManager(8, 4)
    parent = fill(cache, request(list(range(8))))
    child = request(list(range(8)), [50])
    assert cache.fork(parent, child) is None
    assert (child.blocks, child.num_computed) == (parent.blocks, 8)


def test_fork_without_a_free_block_starts_before_the_open_one() -> None:
    cache = BlockManager(3, 4)
    parent = fill(cache, request(list(range(10))))
    child = request(list(range(10)), [50])
    assert cache.fork(parent, child) is None
    assert (child.blocks, child.num_computed) == (parent.blocks[:2], 8)


def test_fork_of_a_parent_that_lost_its_blocks_starts_from_nothing() -> None:
    cache = BlockManager(8, 4)
    parent = fill(cache, request(list(range(10))))
    cache.release(parent)
    child = request(list(range(10)), [50])
    assert cache.fork(parent, child) is None
    assert (child.blocks, child.num_computed) == ([], 0)


def test_blocks_are_conserved_over_random_use() -> None:
    rng = random.Random(7)
    cache, live = BlockManager(20, 2), list[Request]()
    for _ in range(5000):
        action = rng.random()
        if action < 0.35 and len(live) < 8:
            live.append(request([rng.randrange(3) for _ in range(rng.randrange(1, 12))]))
            cache.reuse_prefix(live[-1])
        elif action < 0.7 and live:
            r = rng.choice(live)
            target = rng.randint(r.num_computed, r.num_tokens)
            if cache.grow(r, target):
                r.num_computed = target
                cache.publish(r)
        elif action < 0.85 and live:
            parent = rng.choice(live)
            child = request(parent.prompt_ids, [rng.randrange(3)])
            cache.fork(parent, child)
            live.append(child)
        elif live:
            cache.release(live.pop(rng.randrange(len(live))))
        held = [0] * 20
        for r in live:
            for block in r.blocks:
                held[block] += 1
        assert held == cache._references
        assert set(cache._free) == {b for b, count in enumerate(held) if count == 0}
        assert {d: b for b, d in cache._hash_of.items()} == cache._by_hash
    for r in live:
        cache.release(r)
    assert cache.num_free == 20
