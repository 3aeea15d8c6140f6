"""Prompts as vectors.

Covers how a prompt's last hidden states become one vector.

    embed(calls, entries, "mean", hidden_size)
    executor.add_hidden("7", ids, keeping("mean")); pooled(executor.take_logits("7"), len(ids), "mean")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ingot.errors import RequestError
from ingot.llm.batch_calls import Calls
from ingot.llm.prompt_inputs import Entry
from ingot.runtime.likelihood import Keep, keep_last, keep_sum

_KEPT = {"mean": keep_sum, "last": keep_last}


def with_text(prompts: Sequence[Any]) -> Sequence[Any]:
    """The prompts, if none is the empty text, which a tokenizer's BOS would hide.

    Raises:
        RequestError: one is.
    """
    for position, prompt in enumerate(prompts, start=1):
        if isinstance(prompt, str) and not prompt:
            raise RequestError(f"prompt {position}: the text is empty", fix="leave it out")
    return prompts


def embed(calls: Calls, entries: Sequence[Entry], pooling: str, hidden_size: int) -> torch.Tensor:
    """Vectors of prompts that run together, float32 [N, hidden_size] on the CPU.

    Raises:
        RequestError: unknown pooling, or a prompt cannot be computed.
    """
    keep = keeping(pooling)
    if not entries:
        return torch.empty(0, hidden_size)
    chunks = calls.read_hidden(entries, keep)
    return torch.stack([pooled(c, len(e.ids), pooling) for c, e in zip(chunks, entries, strict=True)])


def keeping(pooling: str) -> Keep:
    """What is kept of each chunk's states.

    Raises:
        RequestError: unknown pooling.
    """
    if pooling not in _KEPT:
        raise RequestError("unknown pooling", seen=pooling, allowed=", ".join(_KEPT), field="pooling")
    return _KEPT[pooling]


def pooled(chunks: torch.Tensor, num_tokens: int, pooling: str) -> torch.Tensor:
    """What was kept of a prompt's chunks, float32 [chunks, hidden_size], as its vector [hidden_size]."""
    return chunks[-1] if pooling == "last" else chunks.sum(0) / num_tokens
