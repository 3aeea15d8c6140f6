"""Pictures that come while others decode are encoded in parts behind the steps: tokens stay Hugging Face's.

CUDA graphs are played by threads that stop at each cut, so that parts run when they are replayed and not
before.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot import LLM, Input, Prompt, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import ENCODER_SHARE
from ingot.runtime.encoding import encoder_graphs, encoder_line
from ingot.runtime.encoding.encoder_graphs import EncoderGraphs
from ingot.runtime.encoding.encoder_line import EncoderLine, PartTimes
from ingot.runtime.encoding.recording import Recorder
from tests.encoders.conftest import Side
from tests.encoders.test_pictures import (
    GREEDY,
    MIXED,
    NEW_TOKENS,
    Parts,
    hf_greedy,
    idle,
    ids,
    picture,
    prompt,
)

TEXT: Parts = [ids(6, 40)]
LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)


class Part:
    """One graph of several: goes on with what the one before stopped at."""

    def __init__(self, played: Played, index: int) -> None:
        self.played, self.index = played, index

    def replay(self) -> None:
        self.played.go(self.index)


class Played:
    """What was recorded, run anew by each round of replays, in a thread that waits between two parts."""

    def __init__(self, run: Callable[[Callable[[], None]], None]) -> None:
        self.run, self.next, self.count = run, 0, 1
        run(self._counted)
        self.turn, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.parts = [Part(self, index) for index in range(self.count)]

    def _counted(self) -> None:
        self.count += 1

    def go(self, index: int) -> None:
        assert index == self.next, "parts are replayed in their order"
        if index == 0:
            threading.Thread(target=self._whole, daemon=True).start()
        else:
            self.turn.release()
        assert self.stopped.acquire(timeout=20)
        self.next = (index + 1) % self.count

    def _whole(self) -> None:
        with torch.inference_mode():
            self.run(self._cut)
        self.stopped.release()

    def _cut(self) -> None:
        self.stopped.release()
        assert self.turn.acquire(timeout=20)


class Player(Recorder):
    """In the recorder's place."""

    def __init__(self, device: torch.device) -> None:
        pass

    def record_parts(self, run: Any) -> Any:
        return Played(run).parts, None


@pytest.fixture
def opened(pictures: Side, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Opens engines that encode in parts of one layer."""
    monkeypatch.setattr(encoder_graphs, "Recorder", Player)
    monkeypatch.setattr(encoder_line, "ENCODER_PART", 1)

    def open(**runtime: Any) -> LLM:
        llm = pictures.open(**runtime)
        encoding, encoders = llm.executor.runner.encoding, llm.executor.scheduler.encoders
        encoder: Any = llm.engine.model.encoder
        assert encoding is not None
        assert encoders is not None
        sizes = encoder.longest, encoder.positions(encoder.longest), 4, encoding.device
        encoding._graphs = EncoderGraphs(encoding._keep, *sizes)
        encoding._positions = 4 * sizes[1]
        encoders.parts = True
        for count in (1, 2, 4):  # the first of each is encoded at once, as it is captured
            places = torch.zeros(count * sizes[1], dtype=torch.int64)
            encoding._graphs.begin(torch.zeros(count, *sizes[0]), places, 1)
        return llm

    return open


@pytest.fixture(scope="module")
def expected(pictures: Side) -> list[list[int]]:
    return [hf_greedy(pictures, parts) for parts in MIXED]


def seen_steps(llm: LLM) -> list[SimpleNamespace]:
    """What every step scheduled, filled as they run."""
    schedule, steps = llm.executor.scheduler.schedule, []

    def recorded(**options: Any) -> Any:
        step = schedule(**options)
        counts = {item.request.request_id: item.count for item in step.requests}
        steps.append(SimpleNamespace(counts=counts, in_parts=step.in_parts, jobs=len(step.jobs)))
        return step

    llm.executor.scheduler.schedule = recorded  # type: ignore[method-assign]
    return steps


def beside(llm: LLM, given: list[Prompt], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Tokens of prompts that come while a text is written."""
    stream = llm.stream(prompt(TEXT), LONG)
    next(stream)
    found = [out.token_ids for out in llm.generate(given, params)]
    rest = [token for piece in stream for token in piece.token_ids]
    assert len(rest) == LONG.max_new_tokens - 1
    return found


RUNTIMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"token_budget": 9},
    "one-picture-a-step": {"encoder_budget": 1},
    "cache-of-one-picture": {"encoder_positions": 32},
    "preempted": {"cache_tokens": 272, "max_batch_size": 5},
    "no-prefix-reuse": {"prefix_reuse": False},
}


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
def test_tokens_are_hugging_faces(
    opened: Callable[..., LLM], expected: list[list[int]], runtime: dict[str, Any]
) -> None:
    llm = opened(**runtime)
    steps = seen_steps(llm)
    assert beside(llm, [prompt(parts) for parts in MIXED]) == expected
    assert any(step.in_parts for step in steps)
    assert idle(llm)


def test_decodes_go_on_meanwhile_and_who_comes_behind_passes(opened: Callable[..., LLM]) -> None:
    """A picture first in its prompt: no token of it can be computed, and a text behind it does not wait."""
    llm = opened()
    steps = seen_steps(llm)
    beside(llm, [prompt([100, ids(4, 1)]), prompt([ids(5, 2)])])
    begun = next(index for index, step in enumerate(steps) if step.jobs)
    read = next(
        index for index, step in enumerate(steps) if any(count > 20 for count in step.counts.values())
    )
    assert steps[begun].in_parts
    assert read >= begun + 3, "two parts, a step for each, and one that is spared"
    assert all(1 in step.counts.values() for step in steps[begun:read]), "the stream has its token in each"
    text = next(index for index, step in enumerate(steps) if 5 in step.counts.values())
    assert begun <= text < read


def test_a_few_tokens_wait_for_their_picture_and_many_do_not(
    opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, shares in ((256, [7 + 25 + 3]), (5, [7, 25 + 3])):
        monkeypatch.setattr("ingot.runtime.scheduling.encoder_cache._TOGETHER", most)
        llm = opened(prefix_reuse=False)
        steps = seen_steps(llm)
        beside(llm, [prompt([ids(7, 1), 100, ids(3, 2)])])
        assert [count for step in steps[1:] for count in step.counts.values() if count > 1] == shares


def test_with_nobody_beside_it_a_picture_is_encoded_at_once(
    opened: Callable[..., LLM], expected: list[list[int]]
) -> None:
    llm = opened()
    steps = seen_steps(llm)
    assert llm.generate(prompt(MIXED[0]), GREEDY)[0].token_ids == expected[0]
    assert not any(step.in_parts for step in steps)


def added(llm: LLM, name: str, parts: Parts, params: SamplingParams = GREEDY) -> None:
    """Queue a request in the executor."""
    rules, given, inputs = llm.executor.admission.inputs, [], []
    assert rules is not None
    for part in parts:
        if isinstance(part, int):
            inputs.append(rules.read(picture(part), len(given)))
        given += rules.placeholders(inputs[-1]) if isinstance(part, int) else part
    llm.executor.add(name, given, params, inputs)


def run(llm: LLM) -> dict[str, list[int]]:
    """To the end of all requests; their tokens."""
    found: dict[str, list[int]] = {}
    while llm.executor.has_work:
        for update in llm.executor.step():
            found.setdefault(update.request_id, []).extend(update.token_ids)
    return found


def test_what_is_under_way_and_what_waits_is_encoded_when_nobody_decodes_any_more(
    opened: Callable[..., LLM], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text ends with the step behind which the first part of two pictures of three runs."""
    llm, asked = opened(), []
    fitting = PartTimes.fitting
    monkeypatch.setattr(PartTimes, "fitting", lambda self, *two: asked.append(two) or fitting(self, *two))
    added(llm, "text", TEXT, SamplingParams(max_new_tokens=2, ignore_eos=True))
    llm.executor.step()
    for index in (0, 4, 2):
        added(llm, str(index), MIXED[index])
    llm.executor.step()
    line, encoders = llm.executor.runner.line, llm.executor.scheduler.encoders
    assert line is not None
    assert encoders is not None
    assert (len(line._parts), len(line._group), encoders.num_unready) == (1, 2, 3)
    assert run(llm) == {str(index): expected[index] for index in (0, 4, 2)}
    assert asked == [(2, 3)]
    assert idle(llm)


def test_a_prompts_last_token_may_be_a_pictures(opened: Callable[..., LLM], pictures: Side) -> None:
    """All before it is in the prefix cache, and nobody else decodes: the step that encodes has no request."""
    llm = opened(encoder_positions=32)
    parts: Parts = [ids(8, 60), 105]
    wanted = hf_greedy(pictures, parts)
    added(llm, "first", parts)
    added(llm, "other", [ids(3, 61), 106])  # takes the picture's place
    assert run(llm)["first"] == wanted
    added(llm, "text", TEXT, SamplingParams(max_new_tokens=2, ignore_eos=True))
    llm.executor.step()
    steps = seen_steps(llm)
    added(llm, "again", parts)
    assert run(llm)["again"] == wanted
    assert any(step.in_parts and not step.counts for step in steps)


def test_many_that_wait_are_encoded_at_once(opened: Callable[..., LLM]) -> None:
    many = round(1 / ENCODER_SHARE)
    llm = opened(max_batch_size=2 * many)
    steps = seen_steps(llm)
    shown = [prompt([ids(3, 50 + seed), seed, ids(2, seed)]) for seed in range(200, 200 + many + 2)]
    beside(llm, shown, GREEDY.replace(max_new_tokens=2))
    first = next(index for index, step in enumerate(steps) if step.jobs)
    assert steps[first].in_parts
    assert steps[first].jobs == many + 2
    assert not steps[first + 1].in_parts


def test_a_request_that_leaves_while_its_picture_is_encoded(
    opened: Callable[..., LLM], expected: list[list[int]]
) -> None:
    """Another takes its blocks of the encoder cache at once, and is encoded behind it."""
    llm = opened(encoder_positions=32)
    added(llm, "text", TEXT, LONG)
    llm.executor.step()
    added(llm, "left", [ids(3, 4), 101])
    llm.executor.step()
    llm.executor.abort("left")
    assert llm.executor.scheduler.encoders is not None
    assert llm.executor.scheduler.encoders.num_unready == 1
    added(llm, "next", MIXED[0])
    assert run(llm)["next"] == expected[0]
    assert idle(llm)


def test_a_failed_step_forgets_what_is_under_way(
    opened: Callable[..., LLM], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened()
    text, pictured = llm.stream(prompt(TEXT), LONG), llm.stream(prompt(MIXED[0]), GREEDY)
    next(text)
    line = llm.executor.runner.line
    assert line is not None
    with monkeypatch.context() as patch:
        patch.setattr(line, "_advance", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            next(pictured)
    assert not line._waiting
    assert not line._group
    assert idle(llm)
    assert beside(llm, [prompt(MIXED[0])]) == [expected[0]]


@pytest.mark.parametrize("seed", range(3))
def test_streams_that_come_and_go(opened: Callable[..., LLM], expected: list[list[int]], seed: int) -> None:
    """In any order, some dropped on their way; the others' tokens are what they are alone."""
    draw = random.Random(seed)
    runtime = draw.choice([{}, {"encoder_positions": 64}, {"token_budget": 9}, {"cache_tokens": 400}])
    llm = opened(**runtime)
    streams: list[tuple[int, Any, list[int]]] = []
    for _ in range(60):
        if len(streams) < 5 and draw.random() < 0.4:
            index = draw.randrange(len(MIXED))
            streams.append((index, llm.stream(prompt(MIXED[index]), GREEDY), []))
        if not streams:
            continue
        index, stream, tokens = chosen = draw.choice(streams)
        if draw.random() < 0.05:
            stream.close()
            streams.remove(chosen)
            continue
        piece = next(stream, None)
        if piece is not None:
            tokens += piece.token_ids
        if piece is None or len(tokens) == NEW_TOKENS:
            assert tokens == expected[index]
            stream.close()
            streams.remove(chosen)
    for index, stream, tokens in streams:
        assert tokens + [token for piece in stream for token in piece.token_ids] == expected[index]
    assert idle(llm)


def test_two_equal_pictures_are_encoded_once(opened: Callable[..., LLM]) -> None:
    llm = opened(prefix_reuse=False)
    steps = seen_steps(llm)
    shown = Input(picture(7))
    given = [Prompt([ids(3, 4), shown, ids(count, 5)]) for count in (2, 3)]
    beside(llm, given)
    assert sum(step.jobs for step in steps) == 1


def test_who_waits_for_a_picture_holds_the_blocks_of_its_prompt(opened: Callable[..., LLM]) -> None:
    """Else those that enter behind it could take them, and it would be preempted with its picture ready."""
    llm = opened()
    added(llm, "text", TEXT, LONG)
    llm.executor.step()
    added(llm, "pictured", [100, ids(30, 1)])
    llm.executor.step()
    scheduler = llm.executor.scheduler
    (waiting,) = [one for one in scheduler.running if one.request_id == "pictured"]
    assert waiting.num_computed == 0
    assert len(waiting.blocks) == scheduler.cache.blocks_for(waiting.num_tokens) == 4


def played(line: EncoderLine, *, singles: int, requests: int, layers: object = None) -> None:
    """A step of so many requests, the first of which decode."""
    step: Any = SimpleNamespace(
        in_parts=True,
        jobs=[],
        layout=SimpleNamespace(num_single=singles),
        requests=[None] * requests,
        layers=layers,
    )
    with line.behind(step, fused=False):
        pass


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> EncoderLine:
    """One input of many parts is in it; one part runs behind a step."""
    monkeypatch.setattr(PartTimes, "fitting", lambda *_: 1)
    parts: Any = [SimpleNamespace(replay=lambda: None)] * 20
    encoding: Any = SimpleNamespace(next_group=list, begin=lambda *_, **__: parts)
    found = EncoderLine(encoding, torch.device("cpu"))
    found._waiting = [SimpleNamespace(entry=None)]  # type: ignore[list-item]
    return found


def test_prompts_in_every_step_leave_time_in_every_second(line: EncoderLine) -> None:
    left = []
    for _ in range(6):
        played(line, singles=1, requests=2)
        left.append(len(line._parts))
    assert left == [0, 19, 19, 18, 18, 17]
    played(line, singles=2, requests=2)
    assert len(line._parts) == 16


def test_only_a_step_of_decodes_says_how_long_decodes_take(line: EncoderLine) -> None:
    for _ in range(2):
        played(line, singles=1, requests=2)
    played(line, singles=2, requests=2, layers="of a chunk")
    played(line, singles=0, requests=0)
    line._read_times()
    assert line._times._part_ms
    assert line._times._step_ms is None
    played(line, singles=2, requests=2)
    line._read_times()
    assert line._times._step_ms is not None


def test_parts_fill_the_share_of_a_step() -> None:
    times = PartTimes()
    assert times.fitting(1, 1) == 1
    times.add(1, 0.2, None)
    assert times.fitting(1, 1) == 1, "no step is known"
    times.add(1, 0.2, 8.0)
    assert [times.fitting(1, waiting) for waiting in (1, 2, 9)] == [4, 8, 36]
    assert times.fitting(2, 2) == 1, "no part of two is known"
    times.add(1, 0.4, 8.0)  # slower: at once
    assert times.fitting(1, 1) == 2
    times.add(1, 0.2, 8.0)  # faster: little by little
    assert times.fitting(1, 1) == 2
    times.add(1, 0.4, 4.0)
    assert times.fitting(1, 1) == 1
    times.add(1, 0.4, 12.0)
    assert times.fitting(1, 2) == 2
    times.add(1, 3.0, 12.0)
    assert times.fitting(1, 1) == 1, "one, however long it takes"


@pytest.mark.gpu
def test_on_a_gpu_with_its_graphs(
    pictures: Side, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: the first encoding of a size is not in parts."""
    monkeypatch.setattr(encoder_line, "ENCODER_PART", 1)
    llm = LLM(pictures.folder, "cuda", max_batch_size=8, runtime=RuntimeConfig(block_size=16))
    for seed in (None, 0, 1):
        shown = MIXED if seed is None else [[ids(3, 70 + seed), 110 + seed, ids(3, 71)]]
        wanted = expected if seed is None else [hf_greedy(pictures, shown[0])]
        assert beside(llm, [prompt(parts) for parts in shown]) == wanted
    line = llm.executor.runner.line
    assert line is not None
    assert line._times._part_ms, "parts have run"
    assert idle(llm)
