"""Which replica a request goes to, by the model that it names and how its prompt begins; without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec


class _Body(msgspec.Struct):
    """The fields of a body that matter here, whatever they hold."""

    model: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None


def model_and_key(data: bytes, prefix_bytes: int) -> tuple[str | None, str]:
    """The model that a body names, and the key of its prompt.

    The key is a hash of the first ``prefix_bytes`` bytes of the prompt's JSON. Of a conversation they end at
    the first user message, so that its later turns have the same key. Of several prompts the first counts.

    Returns:
        None where no model is named; ``""`` where there is no prompt, or the body is not JSON: the engine's
        application says what is wrong with it.
    """
    try:
        body = msgspec.json.decode(data, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, ""
    model = body.model if isinstance(body.model, str) else None
    beginning = _beginning(body, prefix_bytes)
    if not beginning:
        return model, ""
    text = msgspec.json.encode(beginning)[:prefix_bytes]
    return model, blake2b(text, digest_size=16).hexdigest()


def _beginning(body: _Body, most: int) -> Any:
    if isinstance(body.messages, list):
        for index, message in enumerate(body.messages):
            if isinstance(message, dict) and message.get("role") == "user":
                return body.messages[: index + 1]
        return body.messages
    prompt = next((one for one in (body.prompt, body.input) if one), None)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    return prompt[:most] if isinstance(prompt, (str, list)) else prompt


def ranked(key: str, loads: Mapping[str, int], most_ahead: int) -> list[str]:
    """Replicas for a prompt, best first: rendezvous hashing with a bound on imbalance. It has no state, so
    every router chooses alike, and when a replica goes, only its own prompts move.

    Each key has its own order of the replicas. Those with ``most_ahead`` (at least 1) requests more than the
    idlest one come after the others, sorted by load.

    Args:
        key: of the prompt's beginning.
        loads: requests in flight, by replica.
    """
    idlest = min(loads.values(), default=0)

    def place(replica: str) -> tuple[int, bytes]:
        weight = blake2b(f"{key} {replica}".encode(), digest_size=8).digest()
        return max(0, loads[replica] - idlest - most_ahead + 1), weight

    return sorted(loads, key=place)
