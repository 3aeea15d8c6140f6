"""Order, fairness and block accounting, over a runner that checks its input."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.config.step_sizes import TOKEN_BUCKETS
from ingot.errors import RequestError
from ingot.runtime.executor import Executor, Update
from ingot.runtime.rehearsal import rehearse
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.scheduling.scheduler import Chunking, Scheduler
from tests.unit.fake_executor import LONG_PROMPT, VOCAB, check_blocks, check_empty, check_step, fake_executor
from tests.unit.fake_matcher import FakeMatcher

STOP = frozenset({0})


def request(name: str, prompt: int, output: int = 50, first: int = 0, **fields: Any) -> Request:
    return Request(name, [first + i for i in range(prompt)], SamplingParams(), prompt + output, **fields)


def scheduler(
    blocks: int = 64, size: int = 4, batch: int = 8, budget: int = 16, reuse: bool = True
) -> Scheduler:
    return Scheduler(BlockManager(blocks, size, reuse), batch, budget)


def run(s: Scheduler) -> ScheduledBatch:
    """One step: what was scheduled is computed, and who reached its end gets a token (or finishes)."""
    step = s.schedule()
    s.computed(step)
    for item in step.requests:
        if item.request.num_uncomputed == 0:
            item.request.output_ids.append(7)
            if item.request.num_tokens >= item.request.max_total_tokens:
                s.finish(item.request)
    return step


def shares(step: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.count) for item in step.requests]


def test_a_long_prompt_runs_in_chunks_of_the_budget() -> None:
    s = scheduler()
    s.add(request("a", 40))
    assert [shares(run(s)) for _ in range(4)] == [
        [("a", 0, 16)],
        [("a", 16, 16)],
        [("a", 32, 8)],
        [("a", 40, 1)],
    ]


def test_decodes_run_before_chunks_and_never_wait_for_them() -> None:
    s = scheduler()
    s.add(request("long", 60))
    s.add(request("short", 3, first=100))
    for _ in range(3):
        run(s)
    assert shares(run(s)) == [("long", 48, 12), ("short", 0, 3)]
    s.add(request("other", 60, first=200))
    assert shares(run(s)) == [("long", 60, 1), ("short", 3, 1), ("other", 0, 14)]
    assert shares(run(s)) == [("long", 61, 1), ("short", 4, 1), ("other", 14, 14)]


def test_a_chunk_is_bounded_only_while_others_decode() -> None:
    s = scheduler(budget=32)
    s.chunking = Chunking(5)
    s.add(request("long", 60))
    assert shares(run(s)) == [("long", 0, 32)]
    s.finish(s.running[0])
    s.add(request("short", 3, first=100))
    run(s)
    for name, first in (("a", 200), ("b", 300)):
        s.add(request(name, 12, first=first))
    decode = [("short", 3 + i, 1) for i in range(4)]
    assert shares(run(s)) == [decode[0], ("a", 0, 5), ("b", 0, 5)]
    assert shares(run(s)) == [decode[1], ("a", 5, 5), ("b", 5, 5)]
    assert shares(run(s)) == [decode[2], ("a", 10, 2), ("b", 10, 2)]
    assert shares(run(s)) == [decode[3], ("a", 12, 1), ("b", 12, 1)]


def test_only_a_long_prompt_is_cut_while_others_decode() -> None:
    s = scheduler(budget=32)
    s.chunking = Chunking(5, beyond=12)
    s.add(request("short", 3, first=100))
    run(s)
    s.add(request("whole", 12, first=200))
    s.add(request("long", 14, first=300))
    decode = [("short", 3 + i, 1) for i in range(4)]
    assert shares(run(s)) == [decode[0], ("whole", 0, 12), ("long", 0, 5)]
    assert shares(run(s)) == [decode[1], ("whole", 12, 1), ("long", 5, 5)]
    assert shares(run(s)) == [decode[2], ("whole", 13, 1), ("long", 10, 4)]


def test_a_scored_prompt_is_bounded_while_others_decode() -> None:
    s = scheduler(budget=32)
    s.chunking = Chunking(5)
    s.add(request("short", 3))
    run(s)
    scored = request("scored", 12, first=100)
    scored.all_logits = True
    s.add(scored)
    assert shares(run(s)) == [("short", 3, 1), ("scored", 0, 5)]


def test_a_decode_runs_before_an_older_chunk() -> None:
    s = scheduler()
    long, short = request("long", 40), request("short", 3, first=100)
    s.running = [long, short]
    s.cache.grow(short, 2)
    short.num_computed = 2
    assert shares(s.schedule()) == [("short", 2, 1), ("long", 0, 15)]


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    s = scheduler(blocks=8)
    s.add(request("a", 20))
    s.add(request("big", 24, first=100))
    s.add(request("small", 2, first=200))
    assert [name for name, _, _ in shares(run(s))] == ["a"]
    assert [r.request_id for r in s.waiting] == ["big", "small"]
    assert [name for name, _, _ in shares(run(s))] == ["a"]


def test_the_batch_size_bounds_running_requests() -> None:
    s = scheduler(batch=2)
    for i in range(4):
        s.add(request(f"r{i}", 2, output=2, first=10 * i))
    assert [name for name, _, _ in shares(run(s))] == ["r0", "r1"]
    assert [name for name, _, _ in shares(run(s))] == ["r0", "r1"]
    assert [name for name, _, _ in shares(run(s))] == ["r2", "r3"]


def test_the_root_of_a_beam_search_takes_the_places_of_all_its_beams() -> None:
    s = scheduler(batch=4)
    s.add(request("root", 20, width=3))
    for i in range(3):
        s.add(request(f"r{i}", 2, first=100 * (i + 1)))
    names = [name for _ in range(3) for name, _, _ in shares(run(s))]
    assert set(names) == {"root", "r0"}
    assert sum(r.width for r in s.running) == 4


def test_the_newest_is_preempted_and_resumes_first() -> None:
    s = scheduler(blocks=6, reuse=False)
    a, b, c = request("a", 7), request("b", 7, first=100), request("c", 3, first=200)
    for r in (a, b, c):
        s.add(r)
    assert len(run(s).requests) == 3  # a 2, b 2, c 1 of 6 blocks
    later = request("later", 2, first=300)
    run(s)
    s.add(later)
    victims = []
    while not victims:
        step = run(s)
        victims = [r.request_id for r in step.preempted]
    assert victims == ["c"]
    assert [r.request_id for r in s.waiting] == ["c", "later"]
    assert c.num_computed == 0
    assert not c.blocks
    assert [name for name, _, _ in shares(step)] == ["a", "b"]
    s.finish(a)
    assert shares(run(s))[1][:2] == ("c", 0)


def test_a_preempted_request_computes_its_output_again() -> None:
    s = scheduler(reuse=False)
    a = request("a", 6)
    s.add(a)
    for _ in range(5):
        run(s)
    s._preempt(a, ScheduledBatch())
    assert shares(run(s)) == [("a", 0, 11)]


def test_no_request_starves_under_pressure() -> None:
    s = scheduler(blocks=10, batch=4, budget=8)
    requests = [request(f"r{i}", 5 + i % 7, output=10 + i % 5, first=40 * i) for i in range(20)]
    for r in requests:
        s.add(r)
    ends: list[str] = []
    for _ in range(2000):
        if not s.has_work:
            break
        before = {r.request_id for r in s.running}
        run(s)
        ends += sorted(before - {r.request_id for r in [*s.running, *s.waiting]})
    assert not s.has_work
    assert sorted(ends) == sorted(r.request_id for r in requests)
    places = [ends.index(r.request_id) for r in requests]
    assert max(abs(place - i) for i, place in enumerate(places)) <= 4, "far from the order of arrival"


def test_beams_of_several_searches_cannot_lock_each_other_out() -> None:
    """Every beam is held, or waits for blocks that held ones have: one must give its blocks up."""
    s = scheduler(blocks=6, budget=32, reuse=False)
    held = [request(f"held{i}", 8, first=100 * i) for i in range(3)]
    for r in held:
        s.add(r)
    run(s)
    for r in held:
        r.held = True
    s.add(request("waiting", 8, first=900))
    step = s.schedule()
    assert shares(step) == [("waiting", 0, 8)]
    assert [len(r.blocks) for r in held] == [2, 2, 0]
    assert all(r in s.running for r in held)


@pytest.mark.parametrize("seed", [1, 14, 51, 52, 53])
def test_a_storm_of_beam_searches_in_a_small_cache(seed: int) -> None:
    rng = random.Random(seed)
    executor, _ = fake_executor(rng.choice((6, 7, 8)), max_batch_size=rng.choice((9, 12, 16)), max_seq_len=24)
    ends: set[str] = set()
    for i in range(8):
        length = rng.choice((1, 2, 3))
        params = SamplingParams(num_beams=3, max_new_tokens=4 - length)
        executor.add(f"b{i}", [rng.randrange(1, 20) for _ in range(length)], params)
    for _ in range(200):
        ends |= {update.request_id for update in executor.step()} if executor.has_work else set()
    assert ends == {f"b{i}" for i in range(8)}
    check_empty(executor)


@dataclass(frozen=True)
class Job:
    """One request of the random traffic."""

    prompt: tuple[int, ...]
    params: SamplingParams | None  # None: the prompt's logits
    grammar: int | None = None

    def add_to(self, executor: Executor, name: str) -> None:
        if self.params is None:
            executor.add_reading(name, self.prompt)
            return
        matcher = None if self.grammar is None else FakeMatcher(VOCAB, self.grammar, seconds=0.001)
        executor.add(name, self.prompt, self.params, matcher=matcher)


@dataclass
class Answer:
    """What has come of one answer of a request."""

    ids: list[int] = field(default_factory=list)
    reason: str | None = None
    stop_id: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


KINDS = ("greedy", "sampled", "penalised", "n", "beams", "beams")
AHEAD = ("greedy", "sampled", "penalised", "n")  # of which none needs the host


class Traffic:
    """Random arrivals and aborts on one executor, everything checked at every step."""

    def __init__(
        self, seed: int, run_ahead: bool = False, grammars: bool = False, chunking: Chunking | None = None
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.kinds = AHEAD if run_ahead and seed % 4 else KINDS
        self.grammars = grammars
        block_size, max_seq_len = rng.choice((1, 2, 4)), rng.choice((24, 31))
        least = -(-max_seq_len // block_size)
        self.executor, self.runner = fake_executor(
            num_blocks=rng.choice((least, least + 1, least + 4, 2 * least, 4 * least)),
            block_size=block_size,
            max_batch_size=rng.choice((4, 6, 8)),
            max_seq_len=max_seq_len,
            token_budget=rng.choice((8, 13, 64)),
            prefix_reuse=rng.random() < 0.8,
            stop_ids=STOP,
            run_ahead=run_ahead,
            chunking=chunking,
        )
        self.jobs: dict[str, Job] = {}
        self.results: dict[str, dict[int, Answer]] = {}
        self.aborted: set[str] = set()

    def run(self, count: int) -> None:
        for _ in range(3000):
            if len(self.jobs) < count and self.rng.random() < 0.4:
                self._arrive()
            if self.jobs and self.rng.random() < 0.05:
                self._abort()
            if self.executor.has_work:
                self._step()
            elif len(self.jobs) >= count:
                return
        pytest.fail("requests starve")

    def _arrive(self) -> None:
        job, name = random_job(self.rng, self.executor, self.kinds), f"job{len(self.jobs)}"
        if self.grammars and job.params is not None and self.rng.random() < 0.4:
            job = replace(job, grammar=self.rng.randrange(9))
        self.jobs[name], self.results[name] = job, {}
        job.add_to(self.executor, name)

    def _abort(self) -> None:
        name = self.rng.choice(list(self.jobs))
        if self.jobs[name].params is None:
            return
        done = name not in {self.executor._owner_of(r) for r in self._live()}
        if not done:
            self.aborted.add(name)
        self.executor.abort(name)
        check_blocks(self.executor)

    def _live(self) -> list[Request]:
        return [*self.executor.scheduler.running, *self.executor.scheduler.waiting]

    def _step(self) -> None:
        before = len(self.runner.steps)
        updates = self.executor.step()
        check_blocks(self.executor)
        if len(self.runner.steps) > before:
            check_step(self.executor, self.runner.steps[-1])
        for update in updates:
            collect(self.results[update.request_id], update)


def collect(result: dict[int, Answer], update: Update) -> None:
    answer = result.setdefault(update.index, Answer())
    assert answer.reason is None, "news after the end"
    answer.ids += update.token_ids
    answer.reason, answer.stop_id = update.finish_reason, update.stop_id
    answer.logprobs += update.logprobs


def random_job(rng: random.Random, executor: Executor, kinds: Sequence[str]) -> Job:
    length = rng.choice((1, 2, 3, 5, 8, LONG_PROMPT, LONG_PROMPT + 1, 15, 21))
    length = min(length, executor.max_seq_len - 1)
    family = rng.randrange(3)
    prompt = tuple((family + i * i) % (VOCAB - 1) + 1 for i in range(length))
    if rng.random() < 0.1 and "beams" in kinds:
        return Job(prompt, None)
    new = rng.choice((1, 2, 5, 9))
    kind = rng.choice(kinds)
    values: dict[str, Any] = {"max_new_tokens": new, "seed": rng.randrange(100)}
    if kind in ("sampled", "n"):
        values |= {"temperature": 1.0, "top_p": 0.9}
    if kind == "n":
        values["n"] = 3
    if kind == "penalised":
        values |= penalties(rng, new)
    if kind == "beams":
        width = rng.choice((2, 3))
        blocks = 2 * width * executor.blocks.blocks_for(min(length + new, executor.max_seq_len))
        if blocks <= executor.blocks.num_blocks:
            values |= {"num_beams": width, "n": rng.choice((1, width))}
            values |= penalties(rng, new) if rng.random() < 0.5 else {}
    elif rng.random() < 0.3:
        values["logprobs"] = rng.choice((0, 2, 20))
    return Job(prompt, SamplingParams(**values))


def penalties(rng: random.Random, new: int) -> dict[str, Any]:
    """One of the rules, or all of them."""
    rules = {
        "repetition_penalty": 1.5,
        "presence_penalty": 1.2,
        "frequency_penalty": 0.7,
        "min_new_tokens": min(new, 3),
        "logit_bias": {rng.randrange(VOCAB): 2.0, VOCAB - 1: -3.0},
    }
    one = rng.choice([*rules, None])
    return rules if one is None else {one: rules[one]}


@functools.cache
def alone(job: Job, max_seq_len: int) -> Any:
    """What a job gives by itself, in a roomy cache."""
    executor, _ = fake_executor(256, 4, max_seq_len=max_seq_len, stop_ids=STOP, prefix_reuse=False)
    job.add_to(executor, "r")
    result: dict[int, Answer] = {}
    while executor.has_work:
        for update in executor.step():
            collect(result, update)
    return result if job.params is not None else executor.take_reading("r").kept


def check_traffic(done: Traffic) -> None:
    """Every answer is that of its request alone, and nothing is held at the end."""
    for name, job in done.jobs.items():
        expected = alone(job, done.executor.max_seq_len)
        if job.params is None:
            assert torch.equal(done.executor.take_reading(name).kept, expected), name
        elif name not in done.aborted:
            assert done.results[name] == expected, f"{name}: {job}"
    check_empty(done.executor)


@functools.cache
@functools.cache
def traffic(seed: int, run_ahead: bool, grammars: bool) -> Traffic:
    """Traffic that has run to its end, which tests only look at."""
    made = Traffic(seed, run_ahead, grammars)
    made.run(25)
    return made


SEEDS = range(16)  # that together meet everything
MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(len(SEEDS), 40)]


@pytest.mark.stays(
    "0-True-True", "1-False-True", "1-True-False", "2-False-False", "3-True-True", "4-False-False"
)
@pytest.mark.grid
@pytest.mark.parametrize("grammars", [False, True])
@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("seed", [*SEEDS, *MORE_SEEDS])
def test_random_traffic_changes_no_answer_and_leaks_nothing(
    seed: int, run_ahead: bool, grammars: bool
) -> None:
    check_traffic(traffic(seed, run_ahead, grammars))


def test_random_traffic_meets_everything() -> None:
    """The seeds together do preempt, cut prompts, share blocks, copy blocks and abort."""
    all_traffic = [traffic(seed, False, False) for seed in SEEDS]
    steps = [step for t in all_traffic for step in t.runner.steps]
    assert sum(t.executor.num_preemptions for t in all_traffic) > 20
    assert sum(bool(step.copies) for step in steps) > 20
    assert sum(not item.samples for step in steps for item in step.requests) > 50
    assert sum(item.start > 0 and item.count > 1 for step in steps for item in step.requests) > 50
    assert sum(len(t.aborted) for t in all_traffic) > 4


@pytest.mark.slow
def test_random_traffic_runs_ahead() -> None:
    """The seeds together preempt requests with pending tokens, and compute tokens of requests that ended."""
    all_traffic = [traffic(seed, True, False) for seed in SEEDS]
    assert sum(t.runner.ahead for t in all_traffic) > 400
    assert sum(t.runner.ahead for t in all_traffic) < sum(len(t.runner.steps) for t in all_traffic)
    assert sum(t.executor.num_preemptions for t in all_traffic) > 20
    assert sum(t.runner.preempted_pending for t in all_traffic) > 10
    assert sum(t.runner.wasted for t in all_traffic) > 20
    assert sum(t.runner.penalized for t in all_traffic) > 200


@pytest.mark.slow
def test_random_traffic_has_grammars_among_others() -> None:
    """The seeds together preempt requests whose tokens follow a grammar, and run ahead beside them."""
    all_traffic = [traffic(seed, True, True) for seed in SEEDS]
    steps = [step for t in all_traffic for step in t.runner.steps]
    held = [[item.request.matcher is not None for item in step.requests] for step in steps]
    assert sum(t.runner.ahead for t in all_traffic) > 400
    assert sum(t.runner.masked for t in all_traffic) > 200
    assert sum(any(flags) and not all(flags) for flags in held) > 200
    assert sum(r.matcher is not None for step in steps for r in step.preempted) > 10


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.05},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_new_tokens": 3},
        {"logit_bias": {5: 1.0}},
        {"logprobs": 5},
        {"num_beams": 2},
        {"logits_processors": (lambda ids, logits: logits,)},
    ],
    ids=lambda values: next(iter(values)),
)
def test_who_holds_the_others(values: dict[str, Any]) -> None:
    """Penalties, bans and log-probabilities run ahead; only beams and functions of a user's need the host."""
    executor, runner = fake_executor(run_ahead=True, stop_ids=STOP)
    executor.add("plain", [1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True))
    executor.add("other", [4, 5], SamplingParams(max_new_tokens=5, ignore_eos=True).replace(**values))
    while executor.has_work:
        executor.step()
    assert (runner.ahead < len(runner.steps)) == bool({"num_beams", "logits_processors"} & set(values))
    check_empty(executor)


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    executor, _ = fake_executor()
    with pytest.raises(RequestError, match=rf"outside the vocabulary; seen: \[{VOCAB}\].*logit_bias"):
        executor.add("r", [1], SamplingParams(logit_bias={3: 1.0, VOCAB: 1.0}))
    assert not executor.has_work


def test_a_request_that_changes_order_keeps_its_tokens() -> None:
    """Beams come and go beside a penalized request: what it chose on the host's turn counts ahead, too."""
    params = SamplingParams(max_new_tokens=20, frequency_penalty=1.5, logprobs=3)
    answers = []
    for beams in (False, True):
        executor, runner = fake_executor(run_ahead=True)
        executor.add("r", [1, 2, 3], params)
        answer = Answer()
        for step in range(40):
            if beams and step in (3, 12):
                executor.add(f"beams{step}", [9, 8], SamplingParams(max_new_tokens=3, num_beams=2))
            for update in executor.step():
                if update.request_id == "r":
                    collect({0: answer}, update)
        answers.append(answer)
        assert (0 < runner.ahead < len(runner.steps)) == beams
        check_empty(executor)
    assert answers[0] == answers[1]
    assert len(answers[0].logprobs) == 20


@pytest.mark.parametrize("run_ahead", [False, True])
def test_nan_logits_end_only_the_penalized_request(run_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, runner = fake_executor(run_ahead=run_ahead)
    logits = runner._logits

    def broken(request: Request, position: int) -> np.ndarray:
        row = logits(request, position)
        return row * np.nan if request.request_id == "bad" and position == 4 else row

    monkeypatch.setattr(runner, "_logits", broken)
    params = SamplingParams(max_new_tokens=6, repetition_penalty=1.3, min_new_tokens=2, logprobs=2)
    for name in ("bad", "good"):
        executor.add(name, [1, 2, 3], params)
    answers: dict[str, Answer] = {"bad": Answer(), "good": Answer()}
    errors = {}
    while executor.has_work:
        for update in executor.step():
            collect({0: answers[update.request_id]}, update)
            errors[update.request_id] = update.error
    assert [len(answers[name].ids) for name in ("bad", "good")] == [2, 6]
    assert "NaN after 5 tokens" in str(errors["bad"])
    assert errors["good"] is None
    check_empty(executor)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_the_number_of_steps(run_ahead: bool) -> None:
    """Running ahead costs no step for a request that ends by length, one for an end token."""
    executor, runner = fake_executor(run_ahead=run_ahead)
    executor.add("r", [1, 2, 3], SamplingParams(max_new_tokens=5))
    news = []
    while executor.has_work:
        news.append([token for update in executor.step() for token in update.token_ids])
    assert len(runner.steps) == 5
    assert [len(n) for n in news] == ([0] if run_ahead else []) + [1] * 5
    first = news[1 if run_ahead else 0][0]
    again, runner = fake_executor(run_ahead=run_ahead, stop_ids=frozenset({first}))
    again.add("r", [1, 2, 3], SamplingParams(max_new_tokens=5))
    while again.has_work:
        last = again.step()
    assert last[0].stop_id == first
    assert len(runner.steps) == (2 if run_ahead else 1)
    check_empty(again)


@pytest.mark.parametrize("longest", [2, 4, 40, 4096])
def test_a_rehearsal_leaves_nothing(longest: int) -> None:
    executor, runner = fake_executor(2000, run_ahead=True, token_budget=2048, max_seq_len=longest)
    rehearse(executor)
    steps = runner.steps
    alone = {step.layout.num_tokens for step in steps if len(step.requests) == 1}
    assert alone >= {size for size in TOKEN_BUCKETS if size < min(longest, 2049)}
    assert longest < 40 or any(0 < step.layout.num_single < len(step.requests) for step in steps)
    assert executor.blocks.prefix_reuse
    assert not executor.blocks._by_hash
    check_empty(executor)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_rehearsal_leaves_the_cache_and_its_counts_as_they_were(
    reuse: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step fails."""
    executor, runner = fake_executor(200, run_ahead=True, token_budget=16, max_seq_len=40)
    executor.blocks.prefix_reuse, executor.num_preemptions = reuse, 7
    if fails:
        step = executor.step

        def stepped() -> Any:
            assert not executor.blocks.prefix_reuse, "its tokens are nobody's"
            executor.num_preemptions += 1
            if len(runner.steps) > 3:
                raise ZeroDivisionError
            return step()

        monkeypatch.setattr(executor, "step", stepped)
        with pytest.raises(ZeroDivisionError):
            rehearse(executor)
    else:
        rehearse(executor)
    assert (executor.blocks.prefix_reuse, executor.num_preemptions) == (reuse, 7)


def test_prompt_tokens_found_in_the_prefix_cache_are_counted() -> None:
    s = scheduler(budget=64)
    for name in "abc":
        s.add(request(name, 10, output=1))
        run(s)
    assert (s.prefix_queries, s.prefix_hits) == (30, 16)  # the last token is always computed: two blocks of 4
    s.add(request("d", 10, all_logits=True))
    run(s)
    assert (s.prefix_queries, s.prefix_hits) == (30, 16)


def test_a_block_is_found_as_soon_as_it_is_full() -> None:
    s = scheduler()
    s.add(request("full", 4))
    run(s)
    s.add(request("after", 5))
    assert shares(run(s)) == [("full", 4, 1), ("after", 4, 1)]


def test_what_a_preempted_request_finds_of_its_own_is_not_counted() -> None:
    s = scheduler(blocks=6, budget=64)
    for name, first in (("a", 0), ("b", 50)):
        s.add(request(name, 9, output=14, first=first))
    preempted = 0
    while s.has_work:
        preempted += len(run(s).preempted)
    assert preempted > 0
    assert (s.prefix_queries, s.prefix_hits) == (18, 0)


def test_a_cache_without_reuse_counts_nothing() -> None:
    s = scheduler(budget=64, reuse=False)
    for name in "ab":
        s.add(request(name, 10, output=1))
        run(s)
    assert (s.prefix_queries, s.prefix_hits) == (0, 0)


def test_a_request_keeps_its_first_count_of_cached_tokens() -> None:
    """Also after it was preempted, when it finds what it has computed itself."""
    s = scheduler(blocks=9, budget=64)
    requests = [request(name, 9, output=14, first=first) for name, first in (("a", 0), ("b", 50))]
    for one in requests:
        assert one.num_reused is None
        s.add(one)
    preempted = 0
    while s.has_work:
        preempted += len(run(s).preempted)
    assert preempted > 0
    assert [one.num_reused for one in requests] == [0, 0]
    found = []
    for name in "cd":
        found.append(request(name, 9, output=1))
        s.add(found[-1])
        run(s)
    assert found[1].num_reused == 8


@pytest.mark.parametrize("values", [{}, {"n": 2}, {"num_beams": 2}])
def test_a_salt_separates_requests(values: dict[str, int]) -> None:
    """Prompts that are distinct without a salt stay distinct with it."""
    executor, _ = fake_executor(num_blocks=64, block_size=4)

    def found(ids: list[int], salt: str) -> bool:
        before = executor.scheduler.prefix_hits
        executor.add("r", ids, SamplingParams(max_new_tokens=2, **values), salt=salt)
        while executor.has_work:
            executor.step()
        return executor.scheduler.prefix_hits > before

    short = list(range(LONG_PROMPT - 1))
    assert [found(short, salt) for salt in ("", "a", "a", "b", "")] == [False, False, True, False, True]
    longer = [*short, *range(LONG_PROMPT)]  # whose keys are turned otherwise
    assert [found(longer, salt) for salt in ("a", "", "a")] == [False, False, True]


@pytest.mark.parametrize("new", [None, 40, 1000])
def test_beams_are_refused_where_they_could_not_fit_alone(new: int | None) -> None:
    """Each may hold the longest sequence twice, while it moves to the next step: 2 × 2 × 12 blocks."""
    params = SamplingParams(num_beams=2, max_new_tokens=new)
    enough, _ = fake_executor(num_blocks=48, block_size=4, max_seq_len=48)
    enough.admission.check(list(range(9)), params)
    short, _ = fake_executor(num_blocks=47, block_size=4, max_seq_len=48)
    with pytest.raises(RequestError, match=r"beams do not fit.*seen: 48 blocks.*<= 47 blocks"):
        short.admission.check(list(range(9)), params)
