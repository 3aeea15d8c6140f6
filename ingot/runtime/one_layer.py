"""One decoder layer run by itself, as the runner runs it.

Owns what a layer was given, call by call, and the replay of these calls over a cache of its own. Knows no
request and no file.

    output = run_layer(layer, inputs, rope_table, block_size=64, max_seq_len=4096, device=device)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ingot.engine.memory_sizes import cache_dtype
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import DecoderLayer


@dataclass
class LayerInputs:
    """What a layer was given for the tokens of one request, in order, on the CPU.

    Attributes:
        delta: [T, hidden_size], the branch output that the layer's first norm adds to the residual.
        residual: [T, hidden_size]; None for a first layer, whose input is ``delta`` alone.
        positions, rope_rows: [T] int64, as in ``ForwardBatch``.
        counts: tokens of each call: the prompt's, perhaps in several, then one a decode step.
    """

    delta: torch.Tensor
    residual: torch.Tensor | None
    positions: torch.Tensor
    rope_rows: torch.Tensor
    counts: tuple[int, ...]

    @property
    def hidden(self) -> torch.Tensor:
        """The layer's input hidden states [T, hidden_size]: delta and residual added, in float32."""
        return self.delta.float() if self.residual is None else self.delta.float() + self.residual.float()


@dataclass
class LayerCalls:
    """The calls of a layer while ``record_calls`` is open."""

    _calls: list[tuple[torch.Tensor | None, ...]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all calls together."""
        return sum(int(delta.shape[0]) for delta, *_ in self._calls if delta is not None)

    def add(self, delta: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> None:
        """Keep copies of what a call was given."""
        given = (delta, residual, batch.positions, batch.rope_rows)
        self._calls.append(tuple(None if t is None else t.detach().to("cpu", copy=True) for t in given))

    def inputs(self) -> LayerInputs:
        """All calls as one request's tokens."""
        delta, residual, positions, rows = zip(*self._calls, strict=True)
        return LayerInputs(
            torch.cat(delta),
            None if residual[0] is None else torch.cat(residual),
            torch.cat(positions),
            torch.cat(rows),
            tuple(len(d) for d in delta),
        )


@contextmanager
def record_calls(layer: DecoderLayer) -> Iterator[LayerCalls]:
    """Record what a layer is given; inside a ``tap``, which has every module called."""
    calls = LayerCalls()

    def record(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        calls.add(given[0], given[1], given[2])

    handle = layer.register_forward_pre_hook(record)
    try:
        yield calls
    finally:
        handle.remove()


@torch.inference_mode()
def run_layer(
    layer: DecoderLayer,
    inputs: LayerInputs,
    rope: torch.Tensor | None,
    *,
    block_size: int,
    max_seq_len: int,
    device: torch.device,
    kv_dtype: str = "model",
) -> torch.Tensor:
    """Repeat the calls; returns the layer's hidden states [T, hidden_size] in its dtype, on the CPU.

    Args:
        layer: on ``device``, in the dtype to compute in.
        rope: the rotary table on ``device``; None for learned positions.
        max_seq_len: the engine's, which decode attention sizes its work by.
        kv_dtype: of the cache, as in ``RuntimeConfig``.
    """
    weight = layer.input_layernorm.weight
    attention = layer.self_attn.config
    num_blocks = -(-sum(inputs.counts) // block_size)
    shape = (num_blocks, attention.num_kv_heads, block_size, attention.head_dim)
    cache = LayerCache.zeros(*shape, cache_dtype(weight.dtype, kv_dtype), device)
    ends = list(itertools.accumulate(inputs.counts))
    pieces = []
    for count, end in zip(inputs.counts, ends, strict=True):
        rows = slice(end - count, end)
        delta = _own(inputs.delta[rows], weight)
        residual = None if inputs.residual is None else _own(inputs.residual[rows], weight)
        batch = _batch(inputs, rows, num_blocks, max_seq_len, device)
        branch, stream = layer(delta, residual, batch, cache, rope)
        pieces.append((branch + stream).cpu())
    return torch.cat(pieces)


def _own(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, as a runner's step has it: alignment may order a sum."""
    return rows.to(like.device, like.dtype, copy=True)


def _batch(
    inputs: LayerInputs, rows: slice, num_blocks: int, max_seq_len: int, device: torch.device
) -> ForwardBatch:
    """One call's batch: a request whose blocks lie in order, so that a token's slot is its position."""
    count = rows.stop - rows.start
    positions = inputs.positions[rows].to(device)

    def row(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return ForwardBatch(
        input_ids=torch.zeros(count, dtype=torch.int64, device=device),
        positions=positions,
        rope_rows=inputs.rope_rows[rows].to(device),
        slot_mapping=positions,
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        query_start=row(0, count),
        seq_lens=row(rows.stop),
        logits_indices=torch.tensor([count - 1], device=device),
        max_query_len=count,
        max_seq_len=max_seq_len,
        num_decodes=1 if count == 1 else 0,
    )
