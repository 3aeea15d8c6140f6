"""A step as graphs.py and prompt_graphs.py put it into their buffers, computed without a graph."""

from __future__ import annotations

from dataclasses import replace

import torch

from ingot import LLM
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.runtime.step.step_buffer import StepBuffer


def padded_logits(llm: LLM, step: ScheduledBatch) -> torch.Tensor:
    """Logits of a step with padding of tokens and requests."""
    runner = llm.executor.runner
    encoding = runner.encoding
    splices = encoding is not None and encoding.splices
    layout = step.layout
    decodes = layout.max_query_len == 1 and not splices
    requests = layout.num_requests + 2
    tokens = requests if decodes else layout.num_tokens + 3
    buffer = StepBuffer(
        *(tokens, requests, -(-runner.max_seq_len // runner.block_size), requests, runner.device),
        num_kv_heads=runner.caches[0].num_kv_heads,
        encoded_positions=runner.forward.encoded_positions,
        block_size=runner.block_size,
        tile_rows=0 if decodes else 16,
        tile_parts=0 if decodes else 8,
    )
    buffer.fill(layout)
    if decodes:
        buffer.host["query_start"][:] = range(requests + 1)
    batch = buffer.padded_batch(1 if decodes else tokens, runner.max_seq_len)
    if encoding is not None and not decodes:
        batch = replace(batch, spliced=encoding.captured(tokens))
    return runner.forward(batch)[: sum(layout.wanted)]
