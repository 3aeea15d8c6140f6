"""Ray Serve's router of requests to an engine's replicas.

Covers the step from Ray's view of replicas to the rule in ``choice.py``. The key of a prompt comes as the
session id of the call. Runs in the process that calls the engine.

    RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"most_ahead": 8})
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ingot.adapters.ray.replica_choice import ranked


class PrefixRouter(RequestRouter):
    """Equal keys go to the same replica while the load is near even; without a key the idlest is taken."""

    def initialize_state(self, most_ahead: int) -> None:
        """Take the ``request_router_kwargs``; ``most_ahead`` as in ``ranked``."""
        self._most_ahead = most_ahead

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Candidates by rank; Ray takes the first whose queue is not full, and asks again after a pause."""
        if pending_request is None or not pending_request.metadata.session_id:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        loads = {name: self._load(one) for name, one in replicas.items()}
        order = ranked(pending_request.metadata.session_id, loads, self._most_ahead)
        return [[replicas[name]] for name in order]

    def _load(self, replica: RunningReplica) -> int:
        """Requests under way, as the replica last said; 0 where it has said nothing for seconds."""
        return self._replica_queue_len_cache.get(replica.replica_id) or 0
