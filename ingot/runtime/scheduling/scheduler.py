"""Chooses the tokens of the next step: in-flight batching over a token budget, chunked prefill, preemption by
recompute.

There is no prefill phase and no decode phase: a request has known tokens and computed tokens, and a step
computes some of the difference. Beside decodes a chunk of a long prompt may take many steps, a few layers in
each; such prompts take turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingot.config.step_sizes import LOGITS_CHUNK, spare_tokens
from ingot.runtime.scheduling.encoder_cache import EncoderCache
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.pace import Pace
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import Layers, ScheduledBatch, ScheduledRequest, layout_of
from ingot.runtime.scheduling.waiting_line import WaitingLine


@dataclass(frozen=True)
class Chunking:
    """What a step computes of one prompt beside decodes: at most ``tokens`` (None: what the budget leaves) of
    prompts with more than ``beyond`` left. With a ``pace`` these are only the first ones, and the others are
    computed layer by layer.
    """

    tokens: int | None = None
    beyond: int = 0
    pace: Pace | None = None


class Scheduler:
    """First come, first served; the newest running request gives way when blocks run out.

    Attributes:
        prompt_budget: tokens of a wide step: what there is to compute of prompts fills it and, where prompts
            are cut beside decodes, no request decodes.
        prefix_queries, prefix_hits: prompt tokens that were looked for in the prefix cache, and those found;
            once for each request that enters a step.
    """

    def __init__(
        self,
        cache: BlockManager,
        max_batch_size: int,
        token_budget: int,
        encoders: EncoderCache | None = None,
        chunking: Chunking | None = None,
        prompt_budget: int = 0,
    ) -> None:
        self.cache = cache
        self.encoders = encoders
        self.max_batch_size = max_batch_size
        self.token_budget = token_budget
        self.prompt_budget = prompt_budget
        self.chunking = chunking or Chunking()
        self.waiting = WaitingLine()
        self.running: list[Request] = []
        self.prefix_queries = self.prefix_hits = 0
        self._copies: list[tuple[int, int]] = []
        self._beside_decodes = False  # the current step
        self._layers: Layers | None = None  # that the last step ran of a chunk which is not computed yet

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Add a running request that continues from ``parent`` (beam search)."""
        copy = self.cache.fork(parent, child)
        if copy is not None:
            self._copies.append(copy)
        if self.encoders is not None:
            self.encoders.fork(parent, child)
        child.arrival = parent.arrival
        self.running.append(child)

    def finish(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def schedule(self, *, layered: bool = True) -> ScheduledBatch:
        """Choose the next step; its requests' blocks are reserved on return.

        Decodes come before chunks of prompts, so that a long prompt does not stall unfinished answers. Not
        ``layered``: no chunk may be computed layer by layer, and no input encoded so.
        """
        step = ScheduledBatch(copies=self._copies)
        self._copies = []
        ready = [r for r in self.running if not (r.held or r.is_full or r.sits_out)]
        counts = [r.num_uncomputed for r in ready]
        if max(counts, default=1) > 1:
            ready.sort(key=lambda r: r.num_uncomputed > 1)
            counts = [r.num_uncomputed for r in ready]
        # A decode only skips this step, for a mask or a token that is not read: layers go on. A held beam may
        # wait for the prompt itself.
        pause = self.chunking.pace is not None and any(
            (r.sits_out or r.is_full) and not r.held and r.num_uncomputed == 1 for r in self.running
        )
        self._beside_decodes = pause or (bool(counts) and counts[0] == 1)
        budget = self.prompt_budget if self._fills_wide_step(ready) else self.token_budget
        paced = layered and self.chunking.pace is not None
        apart = [r for r in ready if self._goes_by_layers(r)] if paced else []
        if self.encoders is not None:
            self.encoders.open_step(beside_decodes=layered and self._beside_decodes)
        in_parts = self.encoders is not None and self.encoders.in_parts
        for request, wanted in zip(ready, counts, strict=True):
            if budget == 0:
                break
            if request in step.preempted or ((pause or step.requests) and request in apart):
                continue
            count, start = wanted, request.num_computed
            if count > 1:
                count = self._share(request, budget, last=request is ready[-1] and not self.waiting)
            room = len(request.blocks) * self.cache.block_size
            if start + count > room and not self._reserve(request, count, step):
                continue
            if request.inputs and (in_parts or len(request.encoded) < len(request.inputs)):
                count = self._encoded(request, count, step)
            if count:
                step.requests.append(ScheduledRequest(request, start, count, count == wanted))
                budget = max(budget - count, 0)
        step.layers = self._layers = self._next_layers(apart, step, pause=pause)
        if not step.preempted:
            self._admit(step, budget, apart)
        step.requests.sort(key=lambda item: item.count > 1)
        if self.encoders is not None:
            step.in_parts = self.encoders.in_parts and self.encoders.num_unready > 0
        if step.requests:
            step.layout = layout_of(step.requests, self.cache.block_size)
        return step

    def computed(self, step: ScheduledBatch) -> None:
        """Record that a step has been given to the device."""
        computed = list(step.requests)
        if step.layers is not None and step.layers.ends:
            computed.append(step.layers.chunk)
            self._layers = None
        for item in computed:
            request = item.request
            request.num_computed = end = item.start + item.count
            if end >= (request.num_published + 1) * self.cache.block_size:  # in few steps of a decode
                self.cache.publish(request)
        if self.encoders is not None:
            for item in step.requests:
                if item.request.encoded:
                    self.encoders.passed(item.request)

    def _fills_wide_step(self, ready: list[Request]) -> bool:
        """Whether prompts that run or may enter have a wide step's tokens: a narrower one would be no
        cheaper per token than the usual steps, which have graphs.
        """
        missing = self.prompt_budget
        if missing <= self.token_budget or self.encoders is not None:
            return False
        if self._beside_decodes and self.chunking.tokens is not None:
            return False  # streams do not stall for more than a usual step
        missing -= sum(_at_once(request) for request in ready if request.num_uncomputed > 1)
        places = self.max_batch_size - sum(request.width for request in self.running)
        blocks = self.cache.num_free
        for request in self.waiting:
            places -= request.width
            blocks -= self.cache.blocks_for(request.num_tokens)
            if missing <= 0 or places < 0 or blocks < 0:
                break
            missing -= _at_once(request)
        return missing <= 0

    def _goes_by_layers(self, request: Request, after: int = 0) -> bool:
        """Whether a prompt is computed a few layers per step after ``after`` more tokens, until its last
        token, which is computed as a decode. Others of the kind wait meanwhile: a share of a step's tokens
        would cost the decodes what layers are to spare them.
        """
        if self.chunking.pace is None or not self._beside_decodes or request.num_uncomputed <= after + 1:
            return False
        read = request.all_logits or request.all_hidden or request.heads or request.probe is not None
        return self._is_long(request) and not read and not request.inputs

    def _next_layers(self, apart: list[Request], step: ScheduledBatch, *, pause: bool) -> Layers | None:
        """The layers that a step runs of the current chunk, or of a new one of the oldest such prompt. A
        chunk whose request cannot go on in this step is dropped: its tokens are computed again.
        """
        pace, before = self.chunking.pace, self._layers
        apart = [request for request in apart if request not in step.preempted]
        if pace is None or not apart:
            return None
        if not pause and (not step.requests or step.requests[0].request.num_uncomputed > 1):
            return None  # a decode may be preempted, or wait for an input: then a prompt goes first, as ever
        if before is None or before.chunk.request not in apart:
            request = apart[0]
            chunk = _scheduled(request, pace.chunk(request.num_uncomputed - 1))
            if not self._reserve(request, chunk.count, step):
                return None
            before = Layers(chunk, 0, 0, ends=False)
        last = pace.last(before.last)
        return Layers(before.chunk, before.last, last, ends=last == pace.num_layers)

    def _is_long(self, request: Request) -> bool:
        return request.is_long or request.num_uncomputed > self.chunking.beyond

    def _admit(self, step: ScheduledBatch, budget: int, apart: list[Request]) -> None:
        """Move waiting requests into the step while batch, budget and blocks allow.

        A request enters only when its full known length fits, so that two half-prefilled prompts do not
        compete. Of those that go by layers one is in flight at a time, with all its blocks from the start;
        the others hold neither a place nor blocks.
        """
        apart = list(apart)
        places = self.max_batch_size - sum(request.width for request in self.running)
        while budget > 0 and (request := self.waiting.first(turn=not apart)) is not None:
            if request.sits_out:
                return
            assert not request.num_pending, "what preempts it waits for its pending tokens"
            if request.width > places:
                return
            reused = self.cache.reuse_prefix(request)
            by_layers = self._goes_by_layers(request, after=self.chunking.tokens or 0)
            if by_layers and apart:
                self._release(request)
                self.waiting.set_aside(request)
                continue
            needed = self.cache.blocks_for(request.num_tokens) - len(request.blocks)
            count = 0
            if needed <= self.cache.num_free:
                count = self._share(request, budget, last=len(self.waiting) == 1)
                count = self._encoded(request, count, step) if request.inputs else count
            waits = needed <= self.cache.num_free  # others may pass it until its input is encoded
            waits = waits and self.encoders is not None and self.encoders.awaits(request)
            if not count and not waits:
                self._release(request)
                held = next((r for r in reversed(self.running) if r.held and r.blocks), None)
                if step.requests or held is None:
                    return
                self._release(held)  # nothing can run until a waiting beam does, which needs its blocks
                continue
            end = request.num_tokens if by_layers or waits else request.num_computed + count
            grown = self.cache.grow(request, end)
            assert grown
            apart += [request] if by_layers else []
            self.waiting.remove(request)
            self.running.append(request)
            places -= request.width
            request.num_reused = reused if request.num_reused is None else request.num_reused
            if self.cache.may_reuse(request) and not request.output_ids:  # a preempted one finds its own
                self.prefix_queries += len(request.prompt_ids)
                self.prefix_hits += reused
            if count:
                step.requests.append(_scheduled(request, count))
            budget = max(budget - count, 0)

    def _share(self, request: Request, budget: int, *, last: bool) -> int:
        """How many of a request's tokens the next step computes.

        The last one with tokens of a prompt may exceed the budget by ``spare_tokens``, so that a few of them
        do not need a step of their own. Beside decodes a long prompt gets no more than its chunk, to its end.
        """
        request.is_long = self._is_long(request)  # to its end
        chunk = self.chunking.tokens if self._beside_decodes and request.is_long else None
        if chunk is not None:
            budget = min(budget, chunk)
        if request.all_logits:
            budget = min(budget, LOGITS_CHUNK)
        elif last and chunk is None and request.num_uncomputed <= budget + spare_tokens(self.token_budget):
            return request.num_uncomputed
        return min(request.num_uncomputed, budget)

    def _encoded(self, request: Request, count: int, step: ScheduledBatch) -> int:
        """How many of ``count`` tokens can be computed with the inputs that are encoded by then."""
        return count if self.encoders is None else self.encoders.share(request, count, step.jobs)

    def _release(self, request: Request) -> None:
        """Take back all that a request holds; it starts over if it is scheduled again."""
        self.cache.release(request)
        if self.encoders is not None:
            self.encoders.release(request)

    def _reserve(self, request: Request, count: int, step: ScheduledBatch) -> bool:
        """Get blocks for ``count`` more tokens, preempting the newest requests; False: itself."""
        while not self.cache.grow(request, request.num_computed + count):
            taken = {id(item.request) for item in step.requests}
            others = (r for r in reversed(self.running) if r.blocks and id(r) not in taken)
            victim = next(others, request)
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, step: ScheduledBatch) -> None:
        """Take a request's blocks. A held one stays in place, for its beam group to decide."""
        self._release(victim)
        if not victim.held:
            self.running.remove(victim)
            self.waiting.put_back(victim)
            step.preempted.append(victim)


def _at_once(request: Request) -> int:
    """How many of its tokens a step without a budget would compute."""
    return min(request.num_uncomputed, LOGITS_CHUNK) if request.all_logits else request.num_uncomputed


def _scheduled(request: Request, count: int) -> ScheduledRequest:
    samples = request.num_computed + count == request.num_tokens
    return ScheduledRequest(request, request.num_computed, count, samples)
