"""The loop that runs an engine: schedule → run → sample → update.

On a GPU the host runs one step behind: a step is sent while the one before it still computes, fed by that
one's tokens on the device; then those tokens are read. A request that turns out to have ended has one token
computed for nothing. One with a grammar sits out until its mask is found. Requests whose next step depends on
the host (beams, logits processors, logits of a whole prompt) make every step be read before the next is sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.device import on_device, wait_for
from ingot.kernels.sampling.feed_tokens import NOT_A_NUMBER
from ingot.layers.decoder import Decoder
from ingot.memory.ledger import MemorySetting
from ingot.memory.memory_error import capacity_of, first_sentence, out_of_memory, ran_out
from ingot.runtime.admission import Admission
from ingot.runtime.beam_group import BeamGroup
from ingot.runtime.encoding.prompt_rows import RowRules
from ingot.runtime.likelihood import Keep, PromptReading, keep_logits
from ingot.runtime.sampling.grammar_masks import GrammarMasks
from ingot.runtime.sampling.pending_tokens import TokensInFlight
from ingot.runtime.sampling.token_logprobs import TokenLogprobs, read_logprobs, with_probe
from ingot.runtime.scheduling.encoder_cache import EncoderCache
from ingot.runtime.scheduling.inputs import InputRules, RequestInput
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.request import FinishReason, Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest
from ingot.runtime.scheduling.scheduler import Chunking, Scheduler
from ingot.runtime.selection import (
    Choice,
    TokenSelector,
    ended_early,
    not_a_number,
    probe_draws,
    take_probes,
)
from ingot.runtime.step.cross_scores import Head, Scores
from ingot.runtime.step.runner import Runner
from ingot.runtime.update import Update
from ingot.text.grammar.grammar_compiler import GrammarMatcher, Grammars

__all__ = ["Executor", "Update"]
_PATIENCE = 0.0005  # seconds that a step ahead waits for masks, while the device computes the one before it


@dataclass(frozen=True)
class StepAhead:
    """A step whose tokens the host has not read: in their order the requests that they are for, then those
    whose probes it reached.
    """

    requests: list[Request]
    probed: list[Request]
    tokens: TokensInFlight


class Executor:
    """Runs requests of one model; not safe to call from several threads at once."""

    def __init__(
        self,
        model: Decoder,
        runner: Runner,
        blocks: BlockManager,
        *,
        stop_ids: frozenset[int],
        max_batch_size: int,
        max_seq_len: int,
        token_budget: int,
        run_ahead: bool = False,
        setting: MemorySetting | None = None,
        encoders: EncoderCache | None = None,
        inputs: InputRules | None = None,
        grammars: Grammars | None = None,
        chunking: Chunking | None = None,
        rows: RowRules | None = None,
        prompt_budget: int = 0,
    ) -> None:
        self.runner = runner
        self.blocks = blocks
        self.stop_ids = stop_ids
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.run_ahead = run_ahead
        vocab_size = model.config.vocab_size
        grammars = grammars or Grammars(None, vocab_size)
        self.admission = Admission(
            vocab_size,
            max_batch_size,
            max_seq_len,
            blocks,
            model.rope_offset,
            inputs,
            grammars,
            stop_ids,
            rows,
        )
        token_budget = max(token_budget, max_batch_size)
        sizes = (max_batch_size, token_budget)
        self.scheduler = Scheduler(blocks, *sizes, encoders, chunking, prompt_budget)
        self.masks = GrammarMasks(runner.feed.masks)
        self.selector = TokenSelector(stop_ids, runner.feed.counts, self.masks, runner.feed.transcripts)
        self.num_preemptions = 0
        self.num_ended = 0  # requests, answers and beams alike
        self.setting = setting
        self._owner: dict[str, str] = {}
        self._groups: dict[str, BeamGroup] = {}
        self._reading: dict[str, PromptReading] = {}
        self._host_bound: set[str] = set()
        self._held_to_grammars: dict[str, Request] = {}
        self._ahead: StepAhead | None = None
        self.before_taps: list[tuple[bool, bool]] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        inputs: Sequence[RequestInput] = (),
        matcher: GrammarMatcher | None = None,
        salt: str = "",
        *,
        checked: bool = False,
    ) -> None:
        """Queue a request; its ``n`` answers (or beams) come back under the same id.

        ``matcher`` is ``admission.matcher(params)``, from any thread: without it a grammar is compiled here,
        which may take seconds. Only requests of one ``salt`` share blocks of the prefix cache. ``checked``:
        ``admission.check`` has taken the prompt, values and inputs already.

        Raises:
            RequestError: as ``Admission.check`` and ``Admission.matcher``.
        """
        ids = list(prompt_ids) if checked else self.admission.check(prompt_ids, params, inputs)
        matcher = matcher or self.admission.matcher(params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        if params.num_beams > 1:
            request = self.admission.request(request_id, ids, params, 0, inputs, matcher, salt, seed)
            request.width = params.num_beams
            self._groups[request_id] = BeamGroup(request, self.stop_ids)
            self._start(request, request_id)
            return
        for index in range(params.n):
            name = f"{request_id}#{index}" if params.n > 1 else request_id
            request = self.admission.request(name, ids, params, index, inputs, matcher, salt, seed)
            self._start(request, request_id)

    def active_ids(self) -> set[str]:
        return set(self._owner.values())

    def add_reading(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        keep: Keep = keep_logits,
        inputs: Sequence[RequestInput] = (),
        heads: Sequence[Head] = (),
        salt: str = "",
        *,
        hidden: bool = False,
    ) -> None:
        """Queue a prompt whose logits at every position are wanted; nothing is generated. Raises as ``add``.

        Args:
            keep: which of a chunk's logits ([count, vocab_size], in the model's dtype, on the device) to
                keep, given them and the position of their first token; by default all, float32 on the CPU.
            heads: of cross-attention, as (layer, head), whose scores are wanted too; the prompt has an input.
            hidden: the hidden states after the final norm ([count, hidden_size]) are wanted in place of
                logits.
        """
        ids = self.admission.checked_ids(prompt_ids, room=0)
        self.admission.check_inputs(inputs)
        params = SamplingParams(max_new_tokens=1)
        request = self.admission.request(request_id, ids, params, 0, inputs, salt=salt)
        request.all_hidden, request.all_logits, request.heads = hidden, not hidden, tuple(heads)
        self._reading[request_id] = PromptReading(keep)
        self._start(request, request_id)

    def take_reading(self, request_id: str) -> PromptReading:
        """What was read of a prompt, once the request has finished."""
        return self._reading.pop(request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its answers) now and free its blocks; unknown ids are ignored."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if self._owner_of(request) == request_id and index in (None, request.sample_index):
                self._end(request)
        self._groups.pop(request_id, None)
        self._reading.pop(request_id, None)

    def step(self) -> list[Update]:
        """Send one step, read one; returns updates of the requests whose tokens were read.

        After an exception the executor holds no requests.
        """
        try:
            with on_device(self.runner.device):
                return self._step()
        except BaseException as error:
            self._ahead = None
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self._end(request)
            self._groups.clear()
            self._reading.clear()
            if self.scheduler.encoders is not None:
                self.scheduler.encoders.clear()
                self.runner.forget_inputs()
            if ran_out(error) and self.setting is not None:
                what, capacity = "a step does not fit in device memory", capacity_of(self.runner.device)
                raise out_of_memory(what, self.setting, capacity, seen=first_sentence(error)) from None
            raise

    def wait_for_device(self) -> None:
        """Wait until no step computes any more. To be called before an executor is dropped: kernels read and
        write pinned memory of the host, which PyTorch gives to others as soon as it is free. Does not raise.
        """
        wait_for(self.runner.device)

    def _step(self) -> list[Update]:
        before, self._ahead = self._ahead, None
        ahead = self.run_ahead and not self._host_bound and not self.runner.eager
        if before is not None:
            running = self.scheduler.running
            grammars = bool(self._held_to_grammars)
            masked = sum(request.matcher is not None for request in running) if grammars else 0
            if not ahead or 2 * masked > len(running):  # steps sent ahead would give fewer tokens
                return self._read(before)
        updates = self._wait_for_masks(None if before is None else _PATIENCE)
        batch = self.scheduler.schedule(layered=not self.runner.eager)
        self.num_preemptions += len(batch.preempted)
        for request in batch.preempted:
            self.selector.forget(request)
        if not batch.requests:
            follows = batch.layers is not None or batch.in_parts
            stuck = before is None and self.has_work and not batch.preempted and not follows
            assert not stuck, "the scheduler made no progress"
            if follows:
                self.runner.run_behind(batch)
                self.scheduler.computed(batch)
        elif ahead:
            self._ahead = self._send(batch)
        else:
            return updates + self._run(batch)
        return updates if before is None else updates + self._read(before)

    def _wait_for_masks(self, seconds: float | None) -> list[Update]:
        """Requests sit out until their masks are there; returns the end of those that have none."""
        if not self._held_to_grammars:
            return []
        updates = []
        for request, error in self.masks.hold([*self._held_to_grammars.values()], seconds):
            if request.ended:
                continue
            owner = self._owner_of(request)
            updates.append(replace(self._finished(request, FinishReason.ABORT), error=error))
            if owner in self._groups:  # a search needs all of its beams
                self.abort(owner)
        return updates

    def _send(self, batch: ScheduledBatch) -> StepAhead:
        requests, probed = [item.request for item in batch.requests if item.samples], batch.probed
        draws = self.selector.draws(requests, counted=True) + probe_draws(probed)
        tokens = self.runner.launch(batch, draws)
        self.scheduler.computed(batch)
        for item, end in zip(batch.requests, batch.layout.logits_ends, strict=True):
            if item.samples:
                item.request.pending_row = end - 1
                item.request.num_pending += 1
        return StepAhead(requests, probed, tokens)

    def _read(self, step: StepAhead) -> list[Update]:
        """Wait for a step's tokens and give them to its requests, unless they have ended."""
        tokens, rows = step.tokens.wait()
        for i, request in enumerate(step.probed, start=len(step.requests)):
            assert rows is not None
            request.probed = rows[i][0]
        updates = []
        for i, request in enumerate(step.requests):
            request.num_pending -= 1
            if request.ended:
                continue
            wanted = request.params.logprobs
            found = None if rows is None or wanted is None else read_logprobs(rows[i], tokens[i], wanted)
            updates.append(self._apply_token(request, tokens[i], found))
        if self._held_to_grammars:
            self.masks.begin(step.requests)
        return updates

    def _run(self, batch: ScheduledBatch) -> list[Update]:
        hidden, scores = None, Scores()
        if any(item.request.all_hidden or item.request.heads for item in batch.requests):
            logits, hidden, scores = self.runner.run_reading(batch)
        else:
            logits = self.runner.run(batch)
        self.scheduler.computed(batch)
        updates, rows, sampling, layout = [], [], [], batch.layout
        for index, item in enumerate(batch.requests):
            request = item.request
            if request.all_logits:
                updates += self._kept(item, logits[layout.logits_of(index)], scores)
            elif request.all_hidden:
                assert hidden is not None
                updates += self._kept(item, hidden[layout.rows_of(index)], scores)
            elif item.samples:
                rows.append(layout.logits_ends[index] - 1)
                sampling.append(request)
        take_probes(batch.probed, logits[layout.num_logits - layout.num_probes :])
        if sampling:
            wanted = logits if len(rows) == logits.shape[0] else logits[rows]
            width = max((g.search.num_candidates for g in self._groups.values()), default=0)
            for choice in self.selector.select(sampling, wanted, width):
                request = choice.request
                group = self._groups.get(self._owner_of(request))
                if choice.error is not None:
                    ended = self._finished(request, FinishReason.ABORT)
                    updates.append(replace(ended, error=choice.error))
                elif group is not None:
                    updates += self._apply_beam(group, choice)
                else:
                    updates.append(self._apply_token(request, choice.token_id, choice.logprobs))
        return updates

    def _kept(self, item: ScheduledRequest, values: torch.Tensor, scores: Scores) -> list[Update]:
        """Keep what a read prompt wants of a step; returns its end."""
        self._reading[item.request.request_id].add(values, item.start, scores.get(item.request.request_id))
        return [self._finished(item.request, FinishReason.LENGTH)] if item.samples else []

    def _apply_token(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Update:
        if token == NOT_A_NUMBER:
            return replace(self._finished(request, FinishReason.ABORT), error=not_a_number(request))
        if request.params.is_end(token, self.stop_ids):
            if request.matcher is not None and not request.matcher.may_end(request.output_ids):
                return replace(self._finished(request, FinishReason.ABORT), error=ended_early(request))
            ended = self._finished(request, FinishReason.STOP, token)
            return ended if logprobs is None else replace(ended, stop_logprob=logprobs.logprob)
        if request.probe is not None:
            logprobs = with_probe(request, logprobs)
        request.output_ids.append(token)
        owner, reason = self._owner[request.request_id], None
        if request.num_known >= request.max_total_tokens:
            reason = FinishReason.LENGTH
            self._end(request)
        found = () if logprobs is None else (logprobs,)
        reused = request.num_reused or 0
        return Update(owner, request.sample_index, (token,), reason, logprobs=found, num_reused=reused)

    def _apply_beam(self, group: BeamGroup, choice: Choice) -> list[Update]:
        owner = self._owner_of(choice.request)
        group.offer(choice)
        if not group.complete:
            return []
        for parent in group.advance(self.scheduler):
            self._end(parent)
        for beam in group.beams:
            self._own(beam, owner)
        if not group.search.done:
            return []
        del self._groups[owner]
        return group.updates(owner)

    def _finished(self, request: Request, reason: FinishReason, stop_id: int | None = None) -> Update:
        reused = request.num_reused or 0
        owner, index = self._owner_of(request), request.sample_index
        update = Update(owner, index, (), reason, stop_id, num_reused=reused)
        self._end(request)
        return update

    def _owner_of(self, request: Request) -> str:
        return self._owner[request.request_id]

    def _start(self, request: Request, owner: str) -> None:
        self._own(request, owner)
        self.scheduler.add(request)

    def _own(self, request: Request, owner: str) -> None:
        self._owner[request.request_id] = owner
        if request.all_logits or request.all_hidden or self.selector.needs_host(request):
            self._host_bound.add(request.request_id)
        if request.matcher is not None:
            self._held_to_grammars[request.request_id] = request
            self.masks.begin([request])

    def _end(self, request: Request) -> None:
        request.ended = True
        self.num_ended += 1
        self.scheduler.finish(request)
        self.selector.forget(request)
        self._owner.pop(request.request_id, None)
        self._host_bound.discard(request.request_id)
        self._held_to_grammars.pop(request.request_id, None)
        self.masks.forget(request)
