"""Which replica a prompt goes to.

Covers the rule: rendezvous hashing with a bound on imbalance. It has no state, so every router chooses alike
and a new one needs to learn nothing; when a replica goes, only its own prompts move.

    ranked("9f86d081", {"a": 3, "b": 0}, most_ahead=8)      # ["a", "b"] or ["b", "a"]: always the same
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b


def ranked(key: str, loads: Mapping[str, int], most_ahead: int) -> list[str]:
    """Replicas for a prompt, best first.

    Each key has its own order of the replicas. Those with ``most_ahead`` requests more than the idlest one
    come after the others, sorted by load.

    Args:
        key: of the prompt's beginning.
        loads: requests in flight, by replica.
        most_ahead: at least 1.
    """
    idlest = min(loads.values(), default=0)

    def place(replica: str) -> tuple[int, bytes]:
        return max(0, loads[replica] - idlest - most_ahead + 1), _weight(key, replica)

    return sorted(loads, key=place)


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key} {replica}".encode(), digest_size=8).digest()
