"""Layers of a long prompt continue in a step whose decodes only wait for grammars."""

from __future__ import annotations

import pytest

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.scheduling.scheduler import Chunking
from tests.unit.fake_executor import VOCAB, FakeRunner, check_empty, fake_executor
from tests.unit.fake_matcher import AtOnce, FakeMatcher
from tests.unit.test_layered_chunk import LAYERS, chunking, layers, scheduler
from tests.unit.test_scheduler import STOP, Traffic, alone, request, run, shares

STREAM = SamplingParams(max_new_tokens=40, ignore_eos=True)
LONG = [1 + i % 20 for i in range(30)]


class TestSchedule:
    def test_a_chunk_continues_while_the_only_decode_waits(self) -> None:
        s = scheduler()
        s.add(request("long", 30))
        run(s)
        assert layers(run(s)) == ("long", 5, 4, 0, 1)
        s.running[0].sits_out = True
        step = run(s)
        assert (shares(step), layers(step)) == ([], ("long", 5, 4, 1, 2))
        s.running[0].sits_out = False
        step = run(s)
        assert (shares(step), layers(step)) == ([("short", 5, 1)], ("long", 5, 4, 2, 3))
        assert s.running[1].num_computed == 9

    def test_a_chunk_ends_in_such_a_step_and_the_next_begins(self) -> None:
        s = scheduler()
        s.add(request("long", 30))
        run(s)
        s.running[0].sits_out = True
        for start in (5, 9):
            for layer in range(LAYERS):
                assert s.running[1].num_computed == start
                step = run(s)
                assert (shares(step), layers(step)) == ([], ("long", start, 4, layer, layer + 1))

    def test_a_full_batch_still_runs_beside_it(self) -> None:
        """Its last token is not read yet; a step of a full chunk would delay the next requests."""
        s = scheduler()
        s.add(request("long", 30))
        run(s)
        assert layers(run(s)) == ("long", 5, 4, 0, 1)
        full = s.running[0]
        full.output_ids.pop()
        full.num_pending = 1
        full.max_total_tokens = full.num_tokens
        assert full.is_full
        step = run(s)
        assert (shares(step), layers(step)) == ([], ("long", 5, 4, 1, 2))

    def test_a_prompt_enters_such_a_step_with_its_first_tokens(self) -> None:
        s = scheduler()
        s.running[0].sits_out = True
        s.add(request("long", 30))
        assert shares(run(s)) == [("long", 0, 5)]

    def test_short_prompts_run_in_such_a_step(self) -> None:
        """One that the budget cuts, and one that comes."""
        s = scheduler(beyond=40)
        s.add(request("long", 60))
        run(s)
        s.add(request("cut", 40, first=200))
        assert shares(run(s)) == [("short", 4, 1), ("cut", 0, 31)]
        s.running[0].sits_out = True
        s.add(request("new", 3, first=300))
        step = run(s)
        assert shares(step) == [("cut", 31, 9), ("new", 0, 3)]
        assert layers(step) == ("long", 5, 4, 1, 2)

    def test_held_beams_wait_for_the_prompt_and_are_not_beside_it(self) -> None:
        s = scheduler()
        s.add(request("long", 30))
        run(s)
        s.running[0].held = s.running[0].sits_out = True
        step = run(s)
        assert (shares(step), step.layers) == ([("long", 5, 25)], None)

    def test_chunks_of_tokens_are_as_ever(self) -> None:
        """Without a pace a prompt makes use of the pause."""
        s = scheduler()
        s.chunking = Chunking(5, beyond=12)
        s.add(request("long", 30))
        run(s)
        s.running[0].sits_out = True
        assert shares(run(s)) == [("long", 5, 25)]


def beside_a_grammar(run_ahead: bool, chunks: Chunking | None) -> tuple[dict[str, list[int]], FakeRunner]:
    """Answers of one stream with a grammar, and of a long prompt that comes meanwhile."""
    executor, runner = fake_executor(run_ahead=run_ahead, chunking=chunks)
    executor.masks._threads = AtOnce()
    found: dict[str, list[int]] = {"stream": [], "long": []}
    executor.add("stream", [5], STREAM, matcher=FakeMatcher(VOCAB, 1))
    for count in range(200):
        if count == 3:
            executor.add("long", LONG, SamplingParams(max_new_tokens=4, seed=1))
        for update in executor.step() if executor.has_work else ():
            found[update.request_id] += update.token_ids
    check_empty(executor)
    return found, runner


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_long_prompt_beside_a_lone_grammar(run_ahead: bool) -> None:
    """No step has more than its first tokens, no layer runs twice, and the tokens are the same as ever."""
    found, runner = beside_a_grammar(run_ahead, chunking())
    assert found == beside_a_grammar(run_ahead, None)[0]
    counts = [item.count for step in runner.steps for item in step.requests if item.count > 1]
    assert counts == [5]
    behind = [step.layers for step in runner.steps if step.layers is not None] + runner.between
    assert len(behind) == len({(one.chunk.start, one.first) for one in behind}) == 6 * LAYERS
    assert bool(runner.between) == run_ahead, "else every step waits for the mask"


def test_two_that_take_turns_with_a_long_prompt() -> None:
    """Most of the batch has grammars: each step is read before the next, and none sits out."""
    executor, runner = fake_executor(run_ahead=True, chunking=chunking())
    executor.masks._threads = AtOnce()
    for name, seed in (("a", 1), ("b", 2)):
        executor.add(name, [5], STREAM, matcher=FakeMatcher(VOCAB, seed))
    executor.step()
    executor.add("long", LONG, SamplingParams(max_new_tokens=1))
    while executor.has_work:
        executor.step()
    assert all(item.count <= 5 for step in runner.steps for item in step.requests)
    check_empty(executor)


def test_the_last_step_of_a_stream_drops_nothing_that_goes_on() -> None:
    """A stream ends by length, and one that came meanwhile goes on."""
    executor, runner = fake_executor(run_ahead=True, chunking=chunking())
    executor.add("first", [5], SamplingParams(max_new_tokens=8, ignore_eos=True))
    executor.step()
    executor.add("long", LONG, SamplingParams(max_new_tokens=1))
    for _ in range(3):
        executor.step()
    executor.add("second", [6, 7], STREAM, matcher=FakeMatcher(VOCAB, 3))
    while executor.has_work:
        executor.step()
    assert all(item.count <= 5 for step in runner.steps for item in step.requests)
    starts = [step.layers for step in [*runner.steps] if step.layers is not None and step.layers.first == 0]
    assert len({one.chunk.start for one in starts}) == len(starts), "none begins twice"
    check_empty(executor)


@pytest.mark.stays("1", "2", "4")
@pytest.mark.grid
@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_with_grammars_changes_no_answer(seed: int) -> None:
    done = traffic(seed)
    for name, job in done.jobs.items():
        if name not in done.aborted:
            assert done.results[name] == alone(job, done.executor.max_seq_len), f"{name}: {job}"
    check_empty(done.executor)


@pytest.mark.slow
def test_random_traffic_has_layers_between_tokens() -> None:
    found = [layers(ScheduledBatch(layers=one)) for seed in range(8) for one in traffic(seed).runner.between]
    assert len(found) > 10


def traffic(seed: int) -> Traffic:
    """Traffic without beams, much of it with grammars."""
    made = Traffic(4 * seed + 1, run_ahead=True, grammars=True, chunking=chunking(beyond=4))
    made.executor.stop_ids = STOP
    made.run(25)
    return made
