"""What a prompt's tokens attend to in its input.

Covers the checks of what is asked, and how it is read.

    logprobs, scores = cross_attention(calls, entry, config, heads=[(1, 0), (2, 3)])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.errors import RequestError
from ingot.llm.batch_calls import Calls
from ingot.llm.prompt_inputs import Entry
from ingot.runtime.likelihood import keep_likelihood
from ingot.runtime.step.cross_scores import Head


def cross_attention(
    calls: Calls, entry: Entry, config: DecoderConfig, heads: Sequence[Head], below: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [tokens - 1] and scores [tokens, heads, positions], as ``LLM.cross_attention``.

    Raises:
        RequestError: the prompt has no input, or the model no such head.
    """
    if not config.crosses or not entry.inputs:
        seen = f"{len(entry.inputs)} inputs, a model of wiring {config.wiring}"
        fix = "a prompt with an input, for a model whose layers attend to one"
        raise RequestError("there is no cross-attention", seen=seen, fix=fix)
    check_heads(heads, config)
    return calls.read_cross(entry, keep_likelihood(entry.ids, below), heads)


def check_heads(heads: Sequence[Head], config: DecoderConfig) -> None:
    """Raises:
    RequestError: there is none, or the model lacks one.
    """
    bad = [
        head for head in heads if not (0 <= head[0] < config.num_layers and 0 <= head[1] < config.num_heads)
    ]
    if bad or not heads:
        allowed = f"layer 0 to {config.num_layers - 1}, head 0 to {config.num_heads - 1}"
        raise RequestError("the model has no such heads", seen=bad, allowed=allowed, fix="the heads")
