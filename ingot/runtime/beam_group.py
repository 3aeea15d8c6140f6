"""The beams of one search as requests: each that has run is held until all have, then all are replaced."""

from __future__ import annotations

from ingot.runtime.scheduling.beam import BeamSearch
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.selection import Choice
from ingot.runtime.update import Update, updates_of_beams


class BeamGroup:
    """The beams of one request; ``beams`` follow the order of the search's live beams."""

    def __init__(self, root: Request, stop_ids: frozenset[int]) -> None:
        self.root = root
        self.search = BeamSearch(root.params, len(root.prompt_ids), stop_ids, root.max_total_tokens)
        self.beams: list[Request] = [root]
        self._candidates: dict[str, list[tuple[int, float]]] = {}
        self._made = 0

    @property
    def complete(self) -> bool:
        return len(self._candidates) == len(self.beams)

    def offer(self, choice: Choice) -> None:
        """A beam has run; it is held until the others have."""
        self._candidates[choice.request.request_id] = choice.candidates
        choice.request.held = True

    def advance(self, scheduler: Scheduler) -> list[Request]:
        """Replace the beams by those that continue; returns the requests that ended.

        Children fork here; the caller ends the parents afterwards, so that shared blocks stay.
        """
        parents = self.beams
        steps = self.search.advance([self._candidates[b.request_id] for b in parents])
        self.beams = [self._child(parents[s.parent], s.token) for s in steps]
        self._candidates.clear()
        for step, child in zip(steps, self.beams, strict=True):
            scheduler.fork(parents[step.parent], child)
        return parents

    def updates(self, owner: str) -> list[Update]:
        """The best ``n`` hypotheses, once the search is done."""
        params, probe, probed = self.root.params, self.root.probe, self.root.probed
        results = self.search.results(params.n)
        first = None if probe is None or probed is None else (probe.token, probed)
        return updates_of_beams(owner, results, first, logprobs=params.logprobs is not None)

    def _child(self, parent: Request, token: int) -> Request:
        self._made += 1
        root = self.root
        matcher = None if parent.matcher is None else parent.matcher.copy()
        return Request(
            f"{root.request_id}/{self._made}",
            root.prompt_ids,
            root.params,
            root.max_total_tokens,
            rope_offset=root.rope_offset,
            cache_key=root.cache_key,
            output_ids=[*parent.output_ids, token],
            inputs=root.inputs,
            matcher=matcher,
            penalizes_prompt=root.penalizes_prompt,
        )
