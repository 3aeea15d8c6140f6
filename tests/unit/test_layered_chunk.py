"""Long prompts that are computed a few layers per step beside decodes: which, when, and how many."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams
from ingot.errors import ConfigError
from ingot.runtime.encoding import moment
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.pace import Pace
from ingot.runtime.scheduling.request import Probe
from ingot.runtime.scheduling.scheduled_batch import Layers, ScheduledBatch, ScheduledRequest, layout_of
from ingot.runtime.scheduling.scheduler import Chunking, Scheduler
from ingot.runtime.step.layered_chunk import LayeredChunk
from ingot.serve.engine_calls.engine_process import served_runtime
from tests.unit.fake_executor import check_empty, fake_executor
from tests.unit.test_scheduler import STOP, Traffic, check_traffic, request, run, shares

LAYERS = 3
SIZES = (2, 4, 8)


def chunking(beyond: int = 12) -> Chunking:
    """Chunks of up to 4 tokens of longer prompts, a layer per step."""
    return Chunking(5, beyond, Pace(0.1, LAYERS, SIZES))


def scheduler(blocks: int = 64, beyond: int = 12) -> Scheduler:
    """One request decodes already."""
    made = Scheduler(BlockManager(blocks, 4, prefix_reuse=False), 8, 32, chunking=chunking(beyond))
    made.add(request("short", 3, first=100))
    run(made)
    return made


def layers(step: ScheduledBatch) -> tuple[str, int, int, int, int] | None:
    """Request, first token, tokens, and the layers that a step runs."""
    found = step.layers
    if found is None:
        return None
    assert found.ends == (found.last == LAYERS)
    return (found.chunk.request.request_id, found.chunk.start, found.chunk.count, found.first, found.last)


class TestSchedule:
    def test_a_long_prompt_runs_layer_by_layer_up_to_its_last_token(self) -> None:
        s = scheduler()
        s.add(request("long", 15))
        assert shares(run(s)) == [("short", 3, 1), ("long", 0, 5)]  # as it enters
        for start, count in ((5, 4), (9, 4), (13, 1)):
            for layer in range(LAYERS):
                assert s.running[1].num_computed == start
                step = run(s)
                assert [name for name, *_ in shares(step)] == ["short"]
                assert layers(step) == ("long", start, count, layer, layer + 1)
        step = run(s)
        assert shares(step)[1] == ("long", 14, 1)
        assert step.requests[1].samples
        assert step.layers is None

    def test_blocks_are_there_from_the_first_layer_and_found_after_the_last(self) -> None:
        s = scheduler()
        s.cache.prefix_reuse = True
        long = request("long", 30)
        s.add(long)
        run(s)
        for layer in range(LAYERS):
            run(s)
            assert len(long.blocks) == 8  # of all its tokens
            assert long.num_published == (2 if layer == LAYERS - 1 else 1)

    def test_as_many_layers_as_the_pace_gives(self) -> None:
        s = scheduler()
        s.add(request("long", 30))
        run(s)
        run(s)
        pace = s.chunking.pace
        assert pace is not None
        pace.measured(4, 1, layers_ms=1.0, step_ms=25.0)
        assert layers(run(s)) == ("long", 5, 4, 1, LAYERS)

    def test_others_are_computed_as_ever(self) -> None:
        """Prompts that are not long, and those of which more is wanted than the next token."""
        s = scheduler()
        s.add(request("whole", 12, first=200))
        assert shares(run(s))[1] == ("whole", 0, 12)
        for number, values in enumerate(
            ({"all_logits": True}, {"all_hidden": True}, {"probe": Probe(20, 1)}, {"heads": ((0, 0),)})
        ):
            one = request(f"read{number}", 30, first=300, **values)
            s.add(one)
            run(s)
            step = run(s)
            assert (one.request_id, 5, 5) in shares(step)
            assert step.layers is None
            s.finish(one)

    def test_the_second_long_prompt_waits_for_the_first(self) -> None:
        s = scheduler()
        for name, first in (("a", 200), ("b", 300)):
            s.add(request(name, 14, first=first))
        assert [name for name, *_ in shares(run(s))] == ["short", "a"]
        steps = [run(s) for _ in range(4 * LAYERS + 1)]
        order = [(found[0], found[1]) for step in steps if (found := layers(step)) is not None]
        starts = [("a", 5), ("a", 9), ("b", 5), ("b", 9)]
        assert order == [one for one in starts for _ in range(LAYERS)]
        assert all("b" not in [name for name, *_ in shares(step)] for step in steps[: 2 * LAYERS])

    def test_without_decodes_an_ordinary_chunk_follows_what_is_computed(self) -> None:
        s = scheduler()
        s.add(request("long", 30))
        run(s)
        assert layers(run(s)) == ("long", 5, 4, 0, 1)
        s.finish(s.running[0])
        step = run(s)
        assert shares(step) == [("long", 5, 25)]
        assert step.layers is None

    def test_returning_decodes_restart_a_chunk(self) -> None:
        s = scheduler()
        long, short = request("long", 60), s.running[0]
        s.add(long)
        run(s)
        assert layers(run(s)) == ("long", 5, 4, 0, 1)
        short.held = True
        assert shares(run(s)) == [("long", 5, 32)]
        short.held = False
        assert layers(run(s)) == ("long", 37, 4, 0, 1)

    def test_an_aborted_one_is_dropped(self) -> None:
        s = scheduler()
        for name, first in (("a", 200), ("b", 300)):
            s.add(request(name, 30, first=first))
        run(s)
        run(s)
        assert layers(run(s)) == ("a", 5, 4, 1, 2)
        s.finish(s.running[1])
        step = run(s)
        assert (shares(step)[1], step.layers) == (("b", 0, 5), None)
        assert layers(run(s)) == ("b", 5, 4, 0, 1)

    def test_a_preempted_prompt_restarts_in_other_blocks(self) -> None:
        s = scheduler()
        long = request("long", 30)
        s.add(long)
        run(s)
        assert layers(run(s)) == ("long", 5, 4, 0, 1)
        s._preempt(long, ScheduledBatch())
        assert shares(run(s))[1] == ("long", 0, 5)
        assert layers(run(s)) == ("long", 5, 4, 0, 1)

    def test_the_newest_gives_way_to_a_chunk(self) -> None:
        """Of a beam, say, that gave its blocks up."""
        s = scheduler(blocks=10)
        for name, first in (("a", 200), ("b", 300)):
            s.add(request(name, 16, first=first))
        run(s)
        s.computed(s.schedule(layered=False))
        assert [r.request_id for r in s.running] == ["short", "a", "b"]
        s.running[0].output_ids.append(7)
        s.cache.release(s.running[1])
        s.cache.grow(s.running[0], 20)
        first = [run(s) for _ in range(LAYERS)]
        assert s.cache.num_free == 0
        assert not any(step.preempted for step in first)
        step = run(s)
        assert [r.request_id for r in step.preempted] == ["b"]
        assert layers(step) == ("a", 4, 4, 0, 1)

    def test_a_chunk_that_no_block_is_left_for_is_none(self) -> None:
        """A prompt gives way to decodes, as ever."""
        s = scheduler(blocks=7)
        s.add(request("long", 16))
        run(s)
        s.cache.release(s.running[1])
        s.cache.grow(s.running[0], 24)
        for _ in range(LAYERS):
            assert run(s).layers is not None
        assert s.cache.num_free == 0
        step = run(s)
        assert ([r.request_id for r in step.preempted], step.layers) == (["long"], None)

    def test_a_decode_that_cannot_run_does_not_block_a_prompt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its last token waits for an input, say: a step without requests would be no step."""
        s = scheduler()
        s.add(request("long", 30))
        run(s)
        assert layers(run(s)) == ("long", 5, 4, 0, 1)
        short = s.running[0]
        monkeypatch.setattr(s, "_encoded", lambda request, count, step: 0)
        short.inputs = (object(),)  # type: ignore[assignment]
        step = run(s)
        assert (shares(step), step.layers) == ([("long", 5, 5)], None)

    def test_a_prompt_that_goes_first_by_one_token_has_no_layers_beside_it(self) -> None:
        """The stream came later and gives way; a share of one token looks like a decode's."""
        one = Chunking(1, 4, Pace(0.1, LAYERS, SIZES))
        s = Scheduler(BlockManager(13, 4, prefix_reuse=False), 8, 32, chunking=one)
        for name, length, first in (("old", 3, 100), ("long", 33, 200), ("new", 3, 300)):
            s.add(request(name, length, first=first))
            run(s)
        s.finish(s.running[0])
        step = run(s)
        while not step.preempted:
            assert layers(step) is not None
            step = run(s)
        assert [r.request_id for r in step.preempted] == ["new"]
        assert [(name, count) for name, _, count in shares(step)] == [("long", 1)]
        assert step.layers is None

    def test_module_by_module_there_are_none(self) -> None:
        s = scheduler()
        s.add(request("long", 30))
        run(s)
        assert layers(run(s)) == ("long", 5, 4, 0, 1)
        step = s.schedule(layered=False)
        assert (shares(step)[1], step.layers) == (("long", 5, 5), None)


class TestTraffic:
    @pytest.mark.stays("0-True", "1-False", "4-False", "6-True", "8-False")
    @pytest.mark.grid
    @pytest.mark.parametrize("run_ahead", [False, True])
    @pytest.mark.parametrize("seed", range(12))
    def test_random_traffic_changes_no_answer_and_leaks_nothing(self, seed: int, run_ahead: bool) -> None:
        check_traffic(traffic(seed, run_ahead))

    @pytest.mark.slow
    def test_random_traffic_meets_everything(self) -> None:
        """Chunks end, are dropped by preemption and otherwise, and several layers run in a step."""
        found = [traffic(seed, run_ahead) for seed in range(12) for run_ahead in (False, True)]
        steps = [step for t in found for step in t.runner.steps]
        under_way = [step.layers for step in steps if step.layers is not None]
        assert sum(one.ends for one in under_way) > 50
        assert sum(one.first == 0 for one in under_way) > sum(one.ends for one in under_way) + 20
        assert sum(one.last - one.first > 1 for one in under_way) > 30
        held = {id(one.chunk.request) for one in under_way}
        assert sum(id(r) in held for step in steps for r in step.preempted) > 10


def traffic(seed: int, run_ahead: bool) -> Traffic:
    """Traffic in which prompts of more than 4 tokens are long, and times are random."""
    pace = Pace(0.5, LAYERS, SIZES)
    made = Traffic(seed, run_ahead, chunking=Chunking(2, 4, pace))
    step, rng = made._step, random.Random(seed)

    def timed() -> None:
        step()
        found = made.runner.steps[-1].layers if made.runner.steps else None
        if found is not None:
            rows, count = pace.size_of(found.chunk.count), found.last - found.first
            pace.measured(
                rows, count, rng.uniform(0.2, 0.7) * count, rng.choice((None, rng.uniform(2.0, 6.0)))
            )

    made._step = timed  # type: ignore[method-assign]
    made.run(25)
    return made


def test_a_prompt_under_way_ends_by_itself_when_it_is_left_alone() -> None:
    """Its tokens are those of the prompt alone, run ahead or not."""
    answers = []
    for run_ahead in (False, True):
        executor, runner = fake_executor(run_ahead=run_ahead, chunking=chunking(), stop_ids=STOP)
        executor.add("short", [5], SamplingParams(max_new_tokens=9, ignore_eos=True))
        executor.step()
        executor.add("long", [1 + i % 20 for i in range(30)], SamplingParams(max_new_tokens=4, seed=1))
        found = []
        while executor.has_work:
            found += [t for u in executor.step() if u.request_id == "long" for t in u.token_ids]
        answers.append(found)
        assert any(step.layers is not None for step in runner.steps)
        assert any(len(step.requests) == 1 and step.layout.num_tokens > 5 for step in runner.steps)
        check_empty(executor)
    alone_executor, _ = fake_executor(stop_ids=STOP)
    alone_executor.add("long", [1 + i % 20 for i in range(30)], SamplingParams(max_new_tokens=4, seed=1))
    expected = []
    while alone_executor.has_work:
        expected += [t for u in alone_executor.step() for t in u.token_ids]
    assert answers == [expected, expected]


class TestPace:
    def test_one_layer_until_times_are_known(self) -> None:
        pace = Pace(0.1, 32)
        assert pace.chunk(10_000) == 256
        assert pace.last(0) == 1
        pace.measured(256, 1, layers_ms=0.25, step_ms=None)
        assert pace.last(1) == 2

    def test_as_many_layers_as_fit_into_the_share(self) -> None:
        pace = Pace(0.1, 32)
        pace.chunk(10_000)
        pace.measured(256, 1, layers_ms=0.25, step_ms=8.0)
        assert pace.last(1) == 4
        assert pace.last(30) == 32
        pace.measured(256, 3, layers_ms=3.0, step_ms=8.0)
        assert pace.last(4) == 5, "one, however long it takes"

    def test_bad_news_counts_at_once_and_good_news_little_by_little(self) -> None:
        pace = Pace(0.5, 32)
        pace.chunk(10_000)
        pace.measured(256, 1, layers_ms=1.0, step_ms=8.0)
        assert pace.last(0) == 4
        pace.measured(256, 4, layers_ms=4.0, step_ms=4.0)
        assert pace.last(0) == 2
        pace.measured(256, 2, layers_ms=2.0, step_ms=8.0)
        assert pace.last(0) == 2
        for _ in range(40):
            pace.measured(256, 2, layers_ms=2.0, step_ms=8.0)
        assert pace.last(0) == 3

    @pytest.mark.parametrize(
        ("layer_ms", "then"), [(0.9, [192, 128, 64, 64]), (0.7, [256, 256]), (0.1, [384, 512, 512])]
    )
    def test_chunks_shrink_and_grow_by_one_size(self, layer_ms: float, then: list[int]) -> None:
        """A layer takes as long however many tokens it has; at most 0.8 ms."""
        pace, found = Pace(0.1, 32), []
        count = pace.chunk(10_000)
        for _ in then:
            pace.measured(count, 1, layer_ms, step_ms=8.0)
            count = pace.chunk(10_000)
            found.append(count)
        assert found == then

    def test_a_larger_chunk_is_taken_to_be_slower_until_it_is_measured(self) -> None:
        pace = Pace(0.1, 32)
        pace.chunk(10_000)
        pace.measured(256, 1, layers_ms=0.4, step_ms=8.0)
        assert pace.last(0) == 2
        assert pace.chunk(10_000) == 384
        assert pace.last(0) == 1
        pace.measured(256, 2, layers_ms=20.0, step_ms=8.0)  # of the chunk before
        assert pace.chunk(10_000) == 384

    def test_the_end_of_a_prompt_is_padded_to_the_next_size(self) -> None:
        pace = Pace(0.1, 32)
        assert [pace.chunk(left) for left in (200, 1)] == [200, 1]
        assert [pace.size_of(count) for count in (1, 64, 65, 512)] == [64, 64, 128, 512]


class Clock:
    """Seconds that pass as a test says."""

    def __init__(self) -> None:
        self.now = 7.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("counts", "decodes"),
    [((1,), True), ((1, 1, 1), True), ((1, 5), False), ((5,), False), ((1, 1, 2), False), ((), False)],
)
def test_the_pace_gets_the_times_of_layers_and_decode_steps(
    counts: tuple[int, ...], decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chunk's rows with their padding; a step that did more than decode, or nothing, says nothing about
    decodes. The next step reports it, so that nothing waits.
    """
    clock, reported = Clock(), []
    monkeypatch.setattr(moment, "time", clock)
    pace: Any = SimpleNamespace(measured=lambda *given: reported.append(given))
    nothing: Any = None
    layered = LayeredChunk(nothing, pace, torch.device("cpu"), 64)
    ran: list[Layers] = []

    def run_layers(layers: Layers) -> int:
        ran.append(layers)
        clock.now += 0.3
        return 8

    monkeypatch.setattr(layered, "_run", run_layers)
    items = [ScheduledRequest(request(f"r{i}", 9), 0, count, samples=True) for i, count in enumerate(counts)]
    for item in items:
        item.request.blocks = [0, 1, 2]
    of_chunk = Layers(ScheduledRequest(request("long", 30), 4, 6, samples=False), 1, 3, ends=False)
    for seconds in (0.5, 0.25):
        with layered.behind(ScheduledBatch(items, layers=of_chunk, layout=layout_of(items, 4))):
            clock.now += seconds
    assert ran == [of_chunk, of_chunk]
    assert reported == [(8, 2, pytest.approx(300.0), pytest.approx(500.0) if decodes else None)]
    with layered.behind(ScheduledBatch(items, layout=layout_of(items, 4))):
        pass
    assert len(reported) == 1, "a step without layers tells nothing"
    with layered.behind(ScheduledBatch(items, layers=of_chunk, layout=layout_of(items, 4))):
        pass
    assert reported[1][2:] == (pytest.approx(300.0), pytest.approx(250.0) if decodes else None)


class TestConfig:
    @pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
    def test_a_share_is_one(self, share: float) -> None:
        with pytest.raises(ConfigError, match=r"prompt_share is out of range.*prompt_share"):
            RuntimeConfig(prompt_chunk=64, prompt_share=share)

    def test_it_needs_tokens_to_begin_with(self) -> None:
        with pytest.raises(ConfigError, match="prompt_share needs prompt_chunk"):
            RuntimeConfig(prompt_share=0.1)

    @pytest.mark.parametrize(
        ("device", "given", "served"),
        [
            ("cuda", {}, (64, 2048, None)),
            ("cuda", {"prompt_share": 0.3}, (64, 2048, 0.3)),
            ("cuda", {"prompt_chunk": 32}, (32, 0, None)),
            ("cuda", {"prompt_chunk": 32, "prompt_share": 0.3}, (32, 0, 0.3)),
            ("cpu", {}, (16, 0, None)),
            ("cpu", {"prompt_share": 0.3}, (16, 0, 0.3)),
        ],
    )
    def test_what_a_server_takes(
        self, device: str, given: dict[str, float], served: tuple[int, int, float | None]
    ) -> None:
        """Whether other limits were given, whose config has all fields, or not."""
        for others in ({}, RuntimeConfig(token_budget=512).to_json()):
            found = served_runtime(others | given, device)
            assert (found.prompt_chunk, found.long_prompt, found.prompt_share) == served
