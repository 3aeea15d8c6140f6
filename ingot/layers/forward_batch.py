"""What every layer reads of a step: its tensors, where its keys and values go, and the layers' caches.

batch = ForwardBatch.of(layout, device, max_seq_len=4096)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ingot.device import expect_e4m3
from ingot.kernels.attention.attention_arguments import Sequences, TileList
from ingot.kernels.cache.cache_scales import E4M3, NARROW_CACHES, CacheScales
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.cache.qkv_placement import TokenPlaces
from ingot.layers.observer import Observed, Observer
from ingot.layers.step_layout import TOKEN_ROWS, StepLayout


@dataclass(frozen=True)
class Encoded:
    """Where the encoded positions of a step's requests are in the second caches (wiring ``cross``).

    Attributes:
        block_tables: [B, max_blocks] int32, as of ``ForwardBatch``; per token after ``by_token``.
        lens: [B] int32, encoded positions per request; 0: it has no input, or is padding.
        rows: [T] int64, the request of each token.
        max_len: an upper bound on ``lens``.
        some_without: whether a request, padding apart, may have no input.
    """

    block_tables: torch.Tensor
    lens: torch.Tensor
    rows: torch.Tensor
    max_len: int
    some_without: bool

    @cached_property
    def sequences(self) -> Sequences:
        """What attention takes, with one query per row of ``lens``."""
        return Sequences(self.block_tables, self.lens, self.max_len)

    def by_token(self) -> Encoded:
        """The same with one row per token."""
        return replace(self, block_tables=self.block_tables[self.rows], lens=self.lens[self.rows])


@dataclass(frozen=True)
class Spliced:
    """Embeddings of inputs (wiring ``prefix``), or that a request brings.

    Attributes:
        slots: [T] int64, row of ``table`` that replaces each token's embedding; -1: none.
        table: [N, hidden_size], in the model's dtype.
        before: embeddings from another table, for other tokens.
    """

    slots: torch.Tensor
    table: torch.Tensor
    before: Spliced | None = None

    def over(self, hidden: torch.Tensor) -> torch.Tensor:
        """Embedded tokens [T, hidden_size] with these replaced."""
        hidden = hidden if self.before is None else self.before.over(hidden)
        taken = (self.slots >= 0)[:, None]
        return torch.where(taken, self.table[self.slots.clamp(min=0)], hidden)


@dataclass(frozen=True)
class Split:
    """Which rows of a captured step attend as decodes and which as chunks, on the device: a graph's launches
    stay the same while the numbers of both change.

    Attributes:
        decode_lens: [D] int32, ``seq_lens`` of the first D requests that have one token, 0 for others: decode
            attention leaves zeros in their rows, which chunks then overwrite. D = 0: none decodes.
        tile_list: [N, 4] int32, as of ``TileList``: all tiles of the requests that do not decode.
        tile_rows: queries per tile.
        tile_parts: as ``parts`` of ``TileList``.
    """

    decode_lens: torch.Tensor
    tile_list: torch.Tensor
    tile_rows: int
    tile_parts: int = 0

    @cached_property
    def listed(self) -> TileList:
        """What ``prefill_attention`` takes."""
        return TileList(self.tile_list, self.tile_parts)


@dataclass
class ForwardBatch:
    """``T`` tokens of ``B`` requests, laid end to end without padding.

    Request b has the tokens ``query_start[b] : query_start[b + 1]``, the last of its ``seq_lens[b]`` tokens:
    token j of a request with q new tokens is at position ``seq_lens - q + j``.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, 0-based position in the request.
        rope_rows: [T] int64, row of the rotary table: the position plus the request's table offset.
        slot_mapping: [T] int64, cache slot of the token's key and value (``block * block_size + offset``); -1
            writes nothing (padding of a graph).
        block_tables: [B, max_blocks] int32, blocks of each request in order; entries past its length are not
            read.
        query_start: [B + 1] int32, cumulative token counts.
        seq_lens: [B] int32, tokens in the cache after this step; 0 marks a padding row of a graph.
        logits_indices: [L] int64, tokens whose logits are wanted.
        max_query_len: most new tokens of a request; 1: every request has one (padding none).
        max_seq_len: an upper bound on ``seq_lens``.
        num_decodes: leading requests with one new token each, the first rows of the step; 0: unknown.
        split: replaces ``num_decodes`` in a captured step that may have decodes and chunks.
        arrivals: [at least B * num_kv_heads, and tile_parts * num_heads] int32 zeros for attention, which
            leaves them at zero; None: each call makes its own.
        observer: receives intermediate values, under the names of step_record.py.
        encoded: what cross-attention reads, if a request of the step has an input.
        spliced: embeddings that replace those of placeholders.
        probes: whether logits of a probe are wanted, too: then as many logits as rows may be of other rows.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    rope_rows: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_decodes: int = 0
    split: Split | None = None
    arrivals: torch.Tensor | None = None
    observer: Observer | None = None
    encoded: Encoded | None = None
    spliced: Spliced | None = None
    probes: bool = False

    @classmethod
    def of(
        cls,
        layout: StepLayout,
        device: torch.device,
        *,
        max_seq_len: int,
        arrivals: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """A step's batch in new tensors, without inputs."""
        tables = np.zeros((layout.num_requests, max(map(len, layout.blocks), default=0)), dtype=np.int32)
        for row, blocks in zip(tables, layout.blocks, strict=True):
            row[: len(blocks)] = blocks
        arrays = {
            **dict(zip(TOKEN_ROWS[:-1], layout.tokens, strict=False)),
            "block_tables": tables,
            "query_start": np.array(layout.query_start, dtype=np.int32),
            "seq_lens": np.array(layout.seq_lens, dtype=np.int32),
            "logits_indices": np.array(layout.logits_indices, dtype=np.int64),
        }
        tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        return cls.over(tensors, layout, max_seq_len=max_seq_len, arrivals=arrivals)

    @classmethod
    def over(
        cls,
        tensors: Mapping[str, torch.Tensor],
        layout: StepLayout,
        *,
        max_seq_len: int,
        arrivals: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """A step's batch over tensors on the device, by their names here."""
        fields: dict[str, Any] = dict(tensors)
        return cls(
            **fields,
            max_query_len=layout.max_query_len,
            max_seq_len=max_seq_len,
            num_decodes=layout.num_single,
            arrivals=arrivals,
            probes=layout.num_probes > 0,
        )

    def see(self, name: str, value: Observed) -> None:
        """Show a value that may be overwritten later."""
        if self.observer is not None:
            self.observer(name, value)

    @property
    def leading_decodes(self) -> int:
        """Leading requests that attend with one query each."""
        return self.seq_lens.shape[0] if self.max_query_len == 1 else self.num_decodes

    # Kernels' arguments, made once per step for all layers.

    @cached_property
    def places(self) -> TokenPlaces:
        """Where the tokens are."""
        return TokenPlaces(self.rope_rows, self.positions, self.slot_mapping)

    @cached_property
    def sequences(self) -> Sequences:
        """All requests."""
        return self._sequences(slice(None))

    @cached_property
    def decodes(self) -> Sequences | None:
        """The leading requests with one query each, if there are any."""
        lens = self.seq_lens[: self.leading_decodes] if self.split is None else self.split.decode_lens
        return Sequences(self.block_tables[: len(lens)], lens, self.max_seq_len) if len(lens) else None

    @cached_property
    def chunks(self) -> Sequences | None:
        """The other requests, if there are any; all with a ``split``."""
        if self.split is not None:
            return self.sequences
        first = self.leading_decodes
        return self._sequences(slice(first, None)) if first < len(self.seq_lens) else None

    def _sequences(self, rows: slice) -> Sequences:
        own = self.block_tables[rows], self.seq_lens[rows]
        return Sequences(*own, self.max_seq_len, self.query_start[rows], self.max_query_len)


@dataclass
class LayerCache(PagedCache):
    """Paged keys and values of one layer. ``encoded`` is the second cache of a layer with cross-attention,
    with its own block numbers.
    """

    encoded: LayerCache | None = None

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        by_head: bool = False,
    ) -> LayerCache:
        """A new cache in ``dtype``; torch.int8 and torch.float8_e4m3fn get scales. ``by_head``: a head's
        blocks are contiguous, so that attention on a CPU reads them in place; not with scales.

        Raises:
            DeviceError: e4m3 on a GPU that cannot convert it.
        """
        if dtype == E4M3:
            expect_e4m3(device)
        narrow = dtype in NARROW_CACHES.values()
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        if by_head and not narrow:
            shape = (num_kv_heads, num_blocks, block_size, head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if by_head and not narrow:
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        scales = CacheScales.zeros(num_blocks, num_kv_heads, block_size, device) if narrow else None
        return cls(keys, values, scales)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(tensor.nbytes for tensor in self.tensors)
