"""Records the calls of one layer, and repeats them over a cache of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ingot.layers.decoder import DecoderLayer
from ingot.layers.forward_batch import Encoded, ForwardBatch, LayerCache
from ingot.layers.mlp import GatedMLP
from ingot.layers.products.layer_products import LayerProducts, Product
from ingot.layers.step_layout import StepLayout
from ingot.memory.memory_sizes import cache_dtype


@dataclass
class LayerInputs:
    """The inputs of a layer for the tokens of one request, in order, on the CPU.

    Attributes:
        hidden: [T, hidden_size], before the first norm.
        positions, rope_rows: [T] int64, as in ``ForwardBatch``.
        counts: tokens of each call: the prompt's, perhaps in several, then one per decode step.
        encoded: [P, encoder's hidden_size], what cross-attention reads of; None: nothing.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    rope_rows: torch.Tensor
    counts: tuple[int, ...]
    encoded: torch.Tensor | None = None

    @classmethod
    def of_input(cls, hidden: torch.Tensor) -> LayerInputs:
        """Of an encoder's layer: states [P, hidden_size] of one input, in one call."""
        count = len(hidden)
        return cls(hidden, torch.arange(count), torch.zeros(count, dtype=torch.int64), (count,))


@dataclass
class LayerCalls:
    """The calls of a layer while ``record_calls`` is open."""

    _calls: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(hidden) for hidden, *_ in self._calls)

    def add(self, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        given = (hidden, batch.positions, batch.rope_rows)
        self._calls.append(tuple(tensor.detach().to("cpu", copy=True) for tensor in given))

    def inputs(self) -> LayerInputs:
        """All calls as one request's tokens."""
        hidden, positions, rows = zip(*self._calls, strict=True)
        return LayerInputs(
            torch.cat(hidden), torch.cat(positions), torch.cat(rows), tuple(len(part) for part in hidden)
        )


@contextmanager
def record_calls(layer: DecoderLayer) -> Iterator[LayerCalls]:
    """Record a layer's inputs; inside a ``tap``, which has every module called."""
    calls = LayerCalls()

    def record(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        calls.add(given[1], given[2])

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
    dtype: torch.dtype,
    kv_dtype: str = "model",
) -> torch.Tensor:
    """Repeat the calls; returns the layer's hidden states [T, hidden_size] in its dtype, on the CPU.

    Args:
        layer: on ``device``, in the ``dtype`` to compute in.
        rope: the rotary table on ``device``; None for learned positions.
        max_seq_len: the engine's, which decode attention sizes its work by.
        kv_dtype: of the cache, as in ``RuntimeConfig``.
    """
    attention = layer.self_attn.config
    num_blocks = -(-sum(inputs.counts) // block_size)
    shape = (num_blocks, attention.num_kv_heads, block_size, attention.head_dim)
    cache = LayerCache.zeros(*shape, cache_dtype(dtype, kv_dtype), device)
    cross, positions, most = layer.encoder_attn, 0, 0
    if inputs.encoded is not None:  # its keys and values are in the first blocks of a second cache
        assert cross is not None
        assert cross.config.encoder is not None
        positions, most = len(inputs.encoded), cross.config.encoder.max_positions
        shape = (-(-positions // block_size), cross.config.num_kv_heads, block_size, cross.config.head_dim)
        cache.encoded = LayerCache.zeros(*shape, cache.keys.dtype, device)
        given = inputs.encoded.to(device, dtype, copy=True)
        cross.write(given, cache.encoded, torch.arange(positions, device=device))
    ends = list(itertools.accumulate(inputs.counts))
    pieces = []
    for count, end in zip(inputs.counts, ends, strict=True):
        rows = slice(end - count, end)
        # In memory of its own, as a runner's step has it: alignment may order a sum.
        hidden = inputs.hidden[rows].to(device, dtype, copy=True)
        batch = request_batch(inputs.rope_rows[rows].to(device), end, num_blocks, block_size, max_seq_len)
        if cache.encoded is not None:  # all tokens read the one input
            blocks = torch.arange(len(cache.encoded.keys), dtype=torch.int32, device=device)
            lens = torch.full((count,), positions, dtype=torch.int32, device=device)
            own = torch.arange(count, device=device)
            encoded = Encoded(blocks.repeat(count, 1), lens, own, most, some_without=False)
            batch = replace(batch, encoded=encoded)
        pieces.append(hidden_after(layer, hidden, batch, cache, rope).cpu())
    return torch.cat(pieces)


def hidden_after(
    layer: DecoderLayer,
    hidden: torch.Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
    rope: torch.Tensor | None,
) -> torch.Tensor:
    """A layer's output hidden states for its input ones, both [T, hidden_size], module by module."""
    norm, mlp = layer.input_layernorm, layer.mlp
    up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
    chosen = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, up, mlp.down_proj)
    qkv, output, up_product, down = (Product(linear, fused=False) for linear in chosen)
    encoded = None
    if layer.encoder_attn is not None:
        cross = layer.encoder_attn
        encoded = Product(cross.q_proj, fused=False), Product(cross.o_proj, fused=False)
    # The next layer's norm only adds here; what it normalises is dropped.
    products = LayerProducts(qkv, output, up_product, down, next_norm=norm, after=qkv, encoded=encoded)
    x, hidden = qkv.form.norm(norm, hidden)
    return layer(x, hidden, batch, cache, rope, products)[1]


def request_batch(
    rope_rows: torch.Tensor, end: int, num_blocks: int, block_size: int, max_seq_len: int
) -> ForwardBatch:
    """The last of the first ``end`` tokens of a request, whose blocks are in order: a token's slot is its
    position. ``rope_rows``: [T] int64, of these tokens.
    """
    count = len(rope_rows)
    layout = StepLayout.of([end - count], [count], [range(num_blocks)], block_size)
    batch = ForwardBatch.of(layout, rope_rows.device, max_seq_len=max_seq_len)
    return replace(batch, rope_rows=rope_rows)
