"""An executor without a model: its "keys and values" are the tokens themselves.

Its runner's cache remembers what was written where, and checks before it answers that a request's blocks hold
exactly its tokens. Logits are a pure function of those tokens, so that two runs can be
compared token by token.

    executor, runner = fake_executor(num_blocks=16, block_size=4)
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ingot.kernels.sampling.token_penalties import ENDS, GENERATED, IN_PROMPT
from ingot.runtime.executor import Executor
from ingot.runtime.sampling.pending_tokens import TokenFeed, TokensInFlight
from ingot.runtime.sampling.sampler import RowSampling, SamplingTensors
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import Layers, ScheduledBatch, ScheduledRequest
from ingot.runtime.scheduling.scheduler import Chunking
from ingot.runtime.step.sampled_step import leave_tokens
from ingot.text.grammar.grammar_compiler import mask_words

VOCAB = 23
LONG_PROMPT = 10  # beyond it a request's keys differ, as Qwen v1's do beyond seq_length
OFFSET = 1000


class FakeRunner:
    """Writes (token, position, rotary row) where the step says, reads them back through the block table."""

    def __init__(self, num_blocks: int, block_size: int, max_batch_size: int, max_seq_len: int) -> None:
        self.device = torch.device("cpu")
        self.feed = TokenFeed(max_batch_size, TokenCounts(max_batch_size, VOCAB, max_seq_len, self.device))
        self.block_size = block_size
        self.eager = False
        self.memory: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.steps: list[ScheduledBatch] = []
        self.ahead = self.preempted_pending = self.penalized = self.masked = 0
        self.table: list[int] = []
        self.unread: dict[tuple[Request, int], int] = {}
        self.reached: tuple[ScheduledRequest, int, list[int]] | None = None
        self.between: list[Layers] = []

    def run(self, step: ScheduledBatch) -> torch.Tensor:
        """Logits of the step's wanted tokens, rows as the real runner gives them."""
        self.steps.append(step)
        assert not any(item.request.held or item.request in step.preempted for item in step.requests)
        read = [list(self.memory[source]) for source, _ in step.copies]
        for content, (_, target) in zip(read, step.copies, strict=True):
            self.memory[target] = content
        for item in step.requests:
            for position in range(item.start, item.start + item.count):
                self._cell(item.request, position, self._entry(item.request, position))
        rows = []
        for item in step.requests:
            end = item.start + item.count
            first = item.start if item.request.all_logits else end - 1
            if item.request.all_logits or item.samples:
                rows += [self._logits(item.request, position) for position in range(first, end)]
        assert step.layout.num_logits == len(rows)
        if step.layers is not None:
            self._run_layers(step, step.layers)
        return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(-1, VOCAB))

    def run_behind(self, step: ScheduledBatch) -> None:
        """Of a step without requests."""
        assert not step.requests
        assert step.layers is not None
        self.between.append(step.layers)
        self._run_layers(step, step.layers)

    def _run_layers(self, step: ScheduledBatch, layers: Layers) -> None:
        """They follow each other, over blocks that stay the request's own; the last ones fill these."""
        chunk, request = layers.chunk, layers.chunk.request
        end = chunk.start + chunk.count
        own = request.blocks[: -(-end // self.block_size)]
        if layers.first:
            assert self.reached == (chunk, layers.first, own)
        assert chunk.start == request.num_computed
        assert end < request.num_known, "the last token is a decode"
        assert request not in [*step.preempted, *(item.request for item in step.requests)]
        assert layers.first < layers.last
        self.reached = chunk, layers.last, own
        if layers.ends:
            for position in range(chunk.start, end):
                self._cell(request, position, self._entry(request, position))

    def launch(self, step: ScheduledBatch, draws: Sequence[RowSampling]) -> TokensInFlight:
        """Tokens of the step's sampling requests; pending ones are read where the last step left them."""
        self.ahead += 1
        self.preempted_pending += sum(request.num_pending > 0 for request in step.preempted)
        for item in step.requests:
            request, position = item.request, item.start + item.count - 1
            if position >= request.num_known:
                assert item.count == 1 or position == request.num_known
                assert self.table[request.pending_row] == self._token(request, position)
        requests = [item.request for item in step.requests if item.samples]
        self._check_counts(requests, draws)
        self._check_masks(requests, draws)
        with torch.inference_mode():
            leave_tokens(self.run(step), SamplingTensors.from_rows(draws, "cpu"), self.feed)
        self.table = self.feed.table[: len(draws)].tolist()
        for request, token in zip(requests, self.table, strict=True):
            self.unread[request, request.num_tokens] = token
        return self.feed.send(len(draws), logprobs=any(draw.logprobs for draw in draws))

    def _check_counts(self, requests: Sequence[Request], draws: Sequence[RowSampling]) -> None:
        """Slots differ, and hold exactly their requests' tokens; end tokens may be banned there."""
        slots = [draw.slot for draw in draws if draw.slot >= 0]
        assert len(set(slots)) == len(slots)
        for request, draw in zip(requests, draws, strict=True):
            if draw.slot < 0:
                continue
            self.penalized += 1
            wanted = [0] * VOCAB
            for position in range(len(request.prompt_ids), request.num_tokens):
                wanted[max(self._token(request, position), 0)] += GENERATED  # NaN is fed as 0
            for token in set(request.prompt_ids):
                wanted[token] += IN_PROMPT
            found = self.feed.counts.table[draw.slot]
            assert (found & ~ENDS).tolist() == wanted, request.request_id

    def _check_masks(self, requests: Sequence[Request], draws: Sequence[RowSampling]) -> None:
        """Every request with a matcher has the mask that follows all of its tokens, and no other has one."""
        for request, draw in zip(requests, draws, strict=True):
            assert (draw.mask >= 0) == (request.matcher is not None)
            if request.matcher is not None:
                assert not request.num_pending
                self.masked += 1
                wanted = np.zeros(mask_words(VOCAB), np.int32)
                request.matcher.copy().mask_into(wanted, request.output_ids)
                assert self.feed.masks.table[draw.mask].tolist() == wanted.tolist()

    @property
    def wasted(self) -> int:
        """Tokens computed for requests that had ended."""
        return sum(position > request.num_known for request, position in self.unread)

    def _token(self, request: Request, position: int) -> int:
        if position < request.num_known:
            return request.tokens(position, position + 1)[0]
        return self.unread[request, position]

    def _entry(self, request: Any, position: int) -> object:
        return self._token(request, position), position, position + request.rope_offset

    def _cell(self, request: Any, position: int, write: object = None) -> object:
        block, slot = request.blocks[position // self.block_size], position % self.block_size
        if write is not None:
            self.memory[block][slot] = write
        return self.memory[block][slot]

    def _logits(self, request: Any, position: int) -> np.ndarray:
        for earlier in range(position + 1):
            found, wanted = self._cell(request, earlier), self._entry(request, earlier)
            assert found == wanted, f"{request.request_id}: {found} in the cache, not {wanted}"
        known = [self._token(request, earlier) for earlier in range(position + 1)]
        tokens = array("q", [request.rope_offset, *known])
        return np.random.RandomState(zlib.crc32(tokens.tobytes())).standard_normal(VOCAB) * 2


def fake_executor(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    max_batch_size: int = 8,
    max_seq_len: int = 48,
    token_budget: int = 64,
    prefix_reuse: bool = True,
    stop_ids: frozenset[int] = frozenset(),
    run_ahead: bool = False,
    chunking: Chunking | None = None,
    prompt_budget: int = 0,
) -> tuple[Executor, FakeRunner]:
    """An executor over a fake model and runner."""
    model: Any = SimpleNamespace(
        config=SimpleNamespace(vocab_size=VOCAB),
        rope_offset=lambda length: OFFSET if length > LONG_PROMPT else 0,
    )
    runner: Any = FakeRunner(num_blocks, block_size, max_batch_size, max_seq_len)
    executor = Executor(
        model,
        runner,
        BlockManager(num_blocks, block_size, prefix_reuse),
        stop_ids=stop_ids,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        token_budget=token_budget,
        run_ahead=run_ahead,
        chunking=chunking,
        prompt_budget=prompt_budget,
    )
    return executor, runner


def check_blocks(executor: Executor) -> None:
    """Every block is free, or held as often as its reference count says; the two hash tables agree."""
    cache, scheduler = executor.blocks, executor.scheduler
    held = [0] * cache.num_blocks
    for request in [*scheduler.running, *scheduler.waiting]:
        assert len(set(request.blocks)) == len(request.blocks), "a block twice in one request"
        assert request.num_computed <= len(request.blocks) * cache.block_size
        for block in request.blocks:
            held[block] += 1
    assert held == cache._references
    assert set(cache._free) == {block for block, count in enumerate(held) if count == 0}
    assert {digest: block for block, digest in cache._hash_of.items()} == cache._by_hash
    assert not any(request.blocks for request in scheduler.waiting)
    running = {request.request_id for request in scheduler.running}
    assert set(executor.runner.feed.counts._held) <= running, "slots are for those in the batch"


def check_step(executor: Executor, step: ScheduledBatch) -> None:
    """The promises of one step."""
    scheduler = executor.scheduler
    assert 0 < step.layout.num_tokens <= scheduler.token_budget
    assert len(step.requests) <= scheduler.max_batch_size
    assert len({id(item.request) for item in step.requests}) == len(step.requests)
    assert all(item.count > 0 for item in step.requests)


def check_empty(executor: Executor) -> None:
    """Nothing is left of requests that have ended."""
    check_blocks(executor)
    assert executor.blocks.num_free == executor.blocks.num_blocks
    assert not executor.has_work
    kept = (executor._owner, executor._groups, executor._reading, executor.runner.feed.counts.num_held)
    kept += (executor._held_to_grammars, executor.masks.num_held)
    assert not any(kept), kept
