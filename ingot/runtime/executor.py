"""The loop that runs an engine: schedule → run → sample → update.

Owns the requests that are under way. Knows token ids, not text; decides nothing that the scheduler, the
runner or the sampler decide.

    executor.add("r0", prompt_ids, params)
    while executor.has_work:
        for update in executor.step(): ...
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.config.sampling import SamplingParams
from ingot.device import on_device
from ingot.errors import OutOfMemoryError, RequestError
from ingot.layers.decoder import Decoder
from ingot.runtime.beam_group import BeamGroup
from ingot.runtime.kv_cache import BlockManager
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.runner import Runner
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.selection import Choice, TokenLogprobs, TokenSelector


@dataclass(frozen=True)
class Update:
    """News of one answer of a request.

    ``token_ids`` are new tokens, without an end token; ``finish_reason`` is None while the answer goes on,
    and ``stop_id`` the end token that was reached. ``logprobs`` go with the tokens. ``index`` counts the
    answers of a request (``n`` or beams).
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None


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
    ) -> None:
        self.model = model
        self.runner = runner
        self.blocks = blocks
        self.stop_ids = stop_ids
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.scheduler = Scheduler(blocks, max_batch_size, max(token_budget, max_batch_size))
        self.selector = TokenSelector(stop_ids, model.config.vocab_size, runner.device)
        self.num_preemptions = 0
        self._owner: dict[str, str] = {}
        self._groups: dict[str, BeamGroup] = {}
        self._prompt_logits: dict[str, list[torch.Tensor]] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self.scheduler.has_work

    def add(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request; its ``n`` answers (or beams) come back under the same id.

        Raises:
            RequestError: as ``check``.
        """
        ids = self.check(prompt_ids, params)
        if params.seed is None:
            params = params.replace(seed=secrets.randbits(63))
        if params.num_beams > 1:
            request = self._request(request_id, ids, params, 0)
            request.width = params.num_beams
            self._groups[request_id] = BeamGroup(request, self.stop_ids)
            self._start(request, request_id)
            return
        for index in range(params.n):
            name = f"{request_id}#{index}" if params.n > 1 else request_id
            self._start(self._request(name, ids, params, index), request_id)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt's ids, when the request can be served.

        Raises:
            RequestError: the prompt is empty, too long, holds unknown ids, or the beams cannot fit.
        """
        ids = self._checked(prompt_ids, room=1)
        self._check_fit(len(ids), params)
        return ids

    def active_ids(self) -> set[str]:
        """Ids of the requests that are not finished."""
        return set(self._owner.values())

    def add_logits(self, request_id: str, prompt_ids: Sequence[int]) -> None:
        """Queue a prompt whose logits at every position are wanted; nothing is generated.

        Raises:
            RequestError: as ``add``.
        """
        ids = self._checked(prompt_ids, room=0)
        request = self._request(request_id, ids, SamplingParams(max_new_tokens=1), 0)
        request.all_logits = True
        self._prompt_logits[request_id] = []
        self._start(request, request_id)

    def logits_ready(self, request_id: str) -> bool:
        """Whether the prompt has been computed to its end."""
        return request_id not in self._owner

    def take_logits(self, request_id: str) -> torch.Tensor:
        """float32 [num_tokens, vocab_size] on the CPU, once the request has finished."""
        return torch.cat(self._prompt_logits.pop(request_id))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its answers) now and free its blocks; unknown ids are ignored."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if self._owner_of(request) == request_id and index in (None, request.sample_index):
                self._end(request)
        self._groups.pop(request_id, None)
        self._prompt_logits.pop(request_id, None)

    def step(self) -> list[Update]:
        """Compute one step; returns the news of the requests that took part.

        After an exception the executor holds no requests.
        """
        try:
            with on_device(self.runner.device):
                return self._step()
        except BaseException as error:
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self._end(request)
            self._groups.clear()
            self._prompt_logits.clear()
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemoryError(
                    "a step does not fit the GPU's memory",
                    seen=str(error).split(". ")[0],
                    fix="a smaller memory_fraction or token_budget",
                ) from None
            raise

    def _step(self) -> list[Update]:
        batch = self.scheduler.schedule()
        self.num_preemptions += len(batch.preempted)
        if not batch.requests:
            assert batch.preempted or not self.has_work, "the scheduler made no progress"
            return []
        logits = self.runner.run(batch)
        self.scheduler.computed(batch)
        updates, rows, sampling = [], [], []
        row = 0
        for item in batch.requests:
            request = item.request
            if request.all_logits:
                pieces = self._prompt_logits[request.request_id]
                if item.start == 0:
                    pieces.clear()  # a preempted prompt starts over
                pieces.append(logits[row : row + item.count].cpu().float())
                row += item.count
                if item.samples:
                    updates.append(self._finished(request, FinishReason.LENGTH))
            elif item.samples:
                rows.append(row)
                sampling.append(request)
                row += 1
        if sampling:
            wanted = logits if len(rows) == logits.shape[0] else logits[rows]
            width = max((g.search.num_candidates for g in self._groups.values()), default=0)
            for choice in self.selector.select(sampling, wanted, width):
                updates += self._apply(choice)
        return updates

    def _apply(self, choice: Choice) -> list[Update]:
        """Give a request its choice; returns the news."""
        request = choice.request
        group = self._groups.get(self._owner_of(request))
        if group is not None:
            return self._apply_beam(group, choice)
        token, params = choice.token_id, request.params
        if token in params.end_ids(self.stop_ids):
            return [self._finished(request, FinishReason.STOP, token)]
        request.output_ids.append(token)
        logprobs = (choice.logprobs,) if choice.logprobs is not None else ()
        reason = FinishReason.LENGTH if request.num_tokens >= request.max_total_tokens else None
        owner = self._owner_of(request)
        if reason is not None:
            self._end(request)
        return [Update(owner, request.sample_index, (token,), reason, logprobs=logprobs)]

    def _apply_beam(self, group: BeamGroup, choice: Choice) -> list[Update]:
        owner = self._owner_of(choice.request)
        group.offer(choice.request, choice.candidates)
        if not group.complete:
            return []
        for parent in group.advance(self.scheduler):
            self._end(parent)
        for beam in group.beams:
            self._owner[beam.request_id] = owner
        if not group.search.done:
            return []
        del self._groups[owner]
        return [
            Update(
                owner,
                i,
                result.output_ids,
                FinishReason(result.finish_reason),
                result.end_token,
                score=result.score,
            )
            for i, result in enumerate(group.results())
        ]

    def _finished(self, request: Request, reason: FinishReason, stop_id: int | None = None) -> Update:
        update = Update(self._owner_of(request), request.sample_index, (), reason, stop_id)
        self._end(request)
        return update

    def _owner_of(self, request: Request) -> str:
        return self._owner[request.request_id]

    def _start(self, request: Request, owner: str) -> None:
        self._owner[request.request_id] = owner
        self.scheduler.add(request)

    def _end(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.selector.forget(request)
        self._owner.pop(request.request_id, None)

    def _request(self, name: str, ids: list[int], params: SamplingParams, index: int) -> Request:
        room = self.max_seq_len - len(ids)
        new = room if params.max_new_tokens is None else min(room, params.max_new_tokens)
        offset = self.model.rope_offset(len(ids))
        return Request(
            name,
            ids,
            params,
            len(ids) + new,
            rope_offset=offset,
            cache_key=offset.to_bytes(8, "little"),
            sample_index=index,
        )

    def _checked(self, prompt_ids: Sequence[int], room: int) -> list[int]:
        ids = list(prompt_ids)
        vocab_size = self.model.config.vocab_size
        if not ids:
            raise RequestError(
                "the prompt is empty", seen="0 tokens", allowed="at least 1 token", fix="the prompt"
            )
        bad = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size]
        if bad:
            raise RequestError(
                "token ids outside the vocabulary", seen=bad[:5], allowed=f"0 to {vocab_size - 1}"
            )
        if len(ids) > self.max_seq_len - room:
            raise RequestError(
                "the prompt is too long",
                seen=f"{len(ids)} tokens",
                allowed=f"<= {self.max_seq_len - room} tokens",
                fix="shorten the prompt, or build with a larger --max-seq-len",
            )
        return ids

    def _check_fit(self, length: int, params: SamplingParams) -> None:
        """Refuse a beam search that could never have all its beams in the batch or in the cache, or that asks
        for what it does not give.
        """
        width = params.num_beams
        if width > 1 and params.logprobs is not None:
            raise RequestError(
                "beam search gives scores, no log-probabilities", seen=params.logprobs, fix="logprobs"
            )
        if width > self.max_batch_size:
            raise RequestError(
                "more beams than the engine's batch",
                seen=width,
                allowed=f"<= {self.max_batch_size}",
                fix="num_beams",
            )
        new = self.max_seq_len if params.max_new_tokens is None else params.max_new_tokens
        worst = 2 * width * self.blocks.blocks_for(min(length + new, self.max_seq_len))
        if width > 1 and worst > self.blocks.num_blocks:
            raise RequestError(
                "the beams do not fit the KV cache",
                seen=f"{worst} blocks at worst",
                allowed=f"<= {self.blocks.num_blocks} blocks",
                fix="fewer num_beams, fewer max_new_tokens, or more cache_tokens",
            )
