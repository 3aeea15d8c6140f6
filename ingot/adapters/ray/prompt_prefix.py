"""What of a request decides the replica: the model, and how its prompt begins.

Covers the key of a prompt: a hash of its beginning, equal for prompts that can share blocks of the KV cache.
It is made of the JSON text, without a tokenizer.

    model, key = model_and_key(b'{"model": "m", "prompt": "Once upon"}', 1024)
"""

from __future__ import annotations

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
        return _first_turn(body.messages)
    prompt = next((one for one in (body.prompt, body.input) if one), None)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    return prompt[:most] if isinstance(prompt, (str, list)) else prompt


def _first_turn(messages: list[Any]) -> list[Any]:
    """Messages up to the first of a user."""
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: index + 1]
    return messages
