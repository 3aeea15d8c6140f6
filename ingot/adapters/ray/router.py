"""Ray Serve's router to an engine's replicas; the key of a prompt is the session id of the call."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ingot.adapters.ray.replica_choice import ranked


class PrefixRouter(RequestRouter):
    """Equal keys go to the same replica while the load is near even; without a key the idlest is taken."""

    def initialize_state(self, most_ahead: int) -> None:
        """Called with the ``request_router_kwargs``; ``most_ahead`` as in ``ranked``."""
        self._most_ahead = most_ahead

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Candidates by rank; Ray takes the first whose queue is not full, and asks again after a pause."""
        if pending_request is None or not pending_request.metadata.session_id:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        # As the replicas last reported; 0 where one has not for seconds.
        queues = self._replica_queue_len_cache
        loads = {name: queues.get(one.replica_id) or 0 for name, one in replicas.items()}
        order = ranked(pending_request.metadata.session_id, loads, self._most_ahead)
        return [[replicas[name]] for name in order]
