"""A step's tensors, filled on the host and read from there by the device, in one kernel.

A GPU has two host buffers, used in turn: one step's may be read while the next is filled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch

from ingot.config.step_sizes import tile_list_length
from ingot.kernels.attention.prefill_reference import NO_TILE
from ingot.kernels.rows.step_upload import upload_step
from ingot.kernels.tiles.prefill_tiles import parts_of
from ingot.kernels.tiles.single_tiles import TARGET_PROGRAMS
from ingot.layers.forward_batch import Encoded, ForwardBatch, Split
from ingot.layers.step_layout import TOKEN_ROWS, StepLayout
from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.sampling.sampler import (
    DRAW_DOUBLES,
    DRAW_LONGS,
    ROW_DOUBLES,
    ROW_LONGS,
    RULES,
    RowSampling,
    SamplingTensors,
)
from ingot.runtime.scheduling.scheduled_batch import EMPTY

_BATCH_FIELDS = (
    *TOKEN_ROWS[:-1],
    "logits_indices",
    "block_tables",
    "query_start",
    "seq_lens",
)
# Arrays that follow one another, which a step writes at once.
_BLOCKS = {
    "tokens": TOKEN_ROWS,
    "longs": ROW_LONGS,
    "doubles": ROW_DOUBLES,
    "draw_longs": DRAW_LONGS,
    "draw_doubles": DRAW_DOUBLES,
}
_FIRST_RULE = ROW_LONGS.index(RULES[0])
_COLUMNS = {
    block: itemgetter(*map(RowSampling._fields.index, names))
    for block, names in _BLOCKS.items()
    if block != "tokens"
}


class _StepSide:
    """One host buffer as named numpy arrays, and the event after which it may be written again."""

    def __init__(self, size: int, pinned: bool, num_requests: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self.words = self.memory.view(torch.int32)
        self.sent = torch.cuda.Event() if pinned else None
        self.arrays: dict[str, np.ndarray] = {}
        # What the arrays have, by row: most of it stays from step to step.
        self.encoded: Sequence[np.ndarray] = ()
        self.blocks: list[Sequence[int]] = [()] * num_requests
        self.counts: Sequence[int] | None = None


class StepBuffer:
    """Room for up to these many tokens, requests, blocks per request and logits rows, and for the counts of
    decode attention with ``num_kv_heads``. With ``encoded_positions`` also for where each request's input of
    up to so many positions lies, in blocks of ``block_size``; with ``tile_rows`` for what a captured step's
    attention does (``Split``), where the keys of few tiles are cut into up to ``tile_parts`` parts.

    Rows that ``fill`` leaves over are padding: they write to no slot and attend to nothing.
    """

    def __init__(
        self,
        num_tokens: int,
        num_requests: int,
        table_width: int,
        num_logits: int,
        device: torch.device,
        num_kv_heads: int = 0,
        encoded_positions: int = 0,
        block_size: int = 1,
        tile_rows: int = 0,
        tile_parts: int = 0,
    ) -> None:
        self.num_tokens = num_tokens
        self.num_requests = num_requests
        self._tile_rows = tile_rows
        self._tile_parts = tile_parts
        self._splits = num_requests > 1  # a request alone is a chunk, whatever its length
        self._encoded_positions = encoded_positions
        # Values of 8 and of 4 bytes by name, and the shapes of tables among them.
        eight = dict.fromkeys(TOKEN_ROWS, num_tokens) | {"logits_indices": num_logits}
        num_draws = num_logits if encoded_positions else num_requests  # probes draw, too
        eight |= dict.fromkeys((*ROW_LONGS, *ROW_DOUBLES), num_draws)
        four = {
            "block_tables": num_requests * table_width,
            "query_start": num_requests + 1,
            "seq_lens": num_requests,
        }
        tables = {"block_tables": (num_requests, table_width)}
        if encoded_positions:
            # One row more: padding tokens belong to a request without an input.
            tables["encoded_tables"] = (num_requests + 1, -(-encoded_positions // block_size))
            eight["encoded_rows"] = num_tokens
            four |= {"encoded_tables": math.prod(tables["encoded_tables"]), "encoded_lens": num_requests + 1}
        if tile_rows:
            most = max(tile_list_length(num_tokens, num_requests, tile_rows), tile_parts)
            tables["tile_list"] = (most, 4)
            four |= {"tile_list": math.prod(tables["tile_list"]), "decode_lens": num_requests}
        self._allocate(eight, four, num_requests, device)
        self._divide(eight, four, tables)
        # Never uploaded: the kernels that count in it leave it at zero.
        counts = max(num_requests * num_kv_heads, TARGET_PROGRAMS if tile_parts else 0)
        self._arrivals = torch.zeros(counts, dtype=torch.int32, device=device) if counts else None
        self._turn = 0

    def _allocate(
        self, eight: Mapping[str, int], four: Mapping[str, int], num_requests: int, device: torch.device
    ) -> None:
        """The host's buffers and the device's; a CPU's step reads the host's."""
        on_gpu = device.type == "cuda"
        size = 8 * sum(eight.values()) + 4 * sum(four.values())
        self._sides = [_StepSide(size, on_gpu, num_requests) for _ in range(2 if on_gpu else 1)]
        first = self._sides[0].memory
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else first

    def _divide(
        self, eight: Mapping[str, int], four: Mapping[str, int], tables: Mapping[str, tuple[int, int]]
    ) -> None:
        """Name the buffers' parts, values of 8 bytes first, and the blocks that a step writes at once."""
        self._views: dict[str, torch.Tensor] = {}
        start = 0
        ends: dict[str, int] = {}
        for name, count in (*eight.items(), *four.items()):
            dtype = torch.float64 if name in ROW_DOUBLES else torch.int64 if name in eight else torch.int32
            end = start + count * dtype.itemsize
            self._views[name] = self._device[start:end].view(dtype)
            for side in self._sides:
                side.arrays[name] = side.memory[start:end].view(dtype).numpy()
            start, ends[name] = end, end
        for block, names in _BLOCKS.items():
            dtype, end = self._views[names[0]].dtype, ends[names[-1]]
            start = end - 8 * sum(eight[name] for name in names)
            for side in self._sides:
                side.arrays[block] = side.memory[start:end].view(dtype).view(len(names), -1).numpy()
        for name, shape in tables.items():
            self._views[name] = self._views[name].view(shape)
            for side in self._sides:
                side.arrays[name] = side.arrays[name].reshape(shape)

    @property
    def host(self) -> dict[str, np.ndarray]:
        """The host side that ``upload`` sends next."""
        return self._sides[self._turn].arrays

    @property
    def feed_rows(self) -> torch.Tensor:
        """[num_tokens] int64 on the device: where the last step left a token's id; -1: in ``input_ids``."""
        return self._views["feed_rows"]

    def padded_batch(self, max_query_len: int, max_seq_len: int) -> ForwardBatch:
        """The full device side as a batch; requests have at most ``max_query_len`` new tokens."""
        split = None
        if self._tile_rows:
            lens = self._views["decode_lens"][: self.num_tokens if self._splits else 0]
            split = Split(lens, self._views["tile_list"], self._tile_rows, self._tile_parts)
        fields: dict[str, Any] = {name: view for name, view in self._views.items() if name in _BATCH_FIELDS}
        return ForwardBatch(
            **fields,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            split=split,
            arrivals=self._arrivals,
            encoded=self._encoded(self.num_requests + (max_query_len > 1), None, some_without=False),
        )

    def batch_of(self, layout: StepLayout, max_seq_len: int) -> ForwardBatch:
        ends = dict.fromkeys(TOKEN_ROWS, layout.num_tokens) | {"logits_indices": layout.num_logits}
        ends |= dict.fromkeys(("block_tables", "seq_lens"), layout.num_requests)
        ends["query_start"] = layout.num_requests + 1
        views = {name: self._views[name][: ends[name]] for name in _BATCH_FIELDS}
        encoded = None
        if layout.inputs.encoded_lens:
            without = layout.some_without_input
            encoded = self._encoded(layout.num_requests, layout.num_tokens, some_without=without)
        batch = ForwardBatch.over(views, layout, max_seq_len=max_seq_len, arrivals=self._arrivals)
        return replace(batch, encoded=encoded)

    def _encoded(self, requests: int, tokens: int | None, *, some_without: bool) -> Encoded | None:
        """Cross-attention's inputs, of so many requests and tokens (None: all)."""
        if not self._encoded_positions:
            return None
        return Encoded(
            self._views["encoded_tables"][:requests],
            self._views["encoded_lens"][:requests],
            self._views["encoded_rows"][:tokens],
            self._encoded_positions,
            some_without,
        )

    def draws(self, num_rows: int, rows: Sequence[RowSampling]) -> SamplingTensors:
        """The device side's values for the first ``num_rows`` draws; ``rows`` say what may be skipped."""
        fields = {name: self._views[name][:num_rows] for name in (*ROW_LONGS, *ROW_DOUBLES)}
        return SamplingTensors.over(fields, rows)

    def fill(self, layout: StepLayout, draws: Sequence[RowSampling] = ()) -> None:
        """Write a step, and how its sampling rows draw, into the host side."""
        self._turn = (self._turn + 1) % len(self._sides)
        sent = self._sides[self._turn].sent
        if sent is not None:
            sent.synchronize()
        side, requests, tokens = self._sides[self._turn], layout.num_requests, layout.num_tokens
        host, moved = side.arrays, side.counts != layout.counts
        host["tokens"][:, :tokens] = layout.tokens
        host["tokens"][3:, tokens:] = -1  # slots and feeds
        host["seq_lens"][:requests] = layout.seq_lens
        host["seq_lens"][requests:] = 0
        host["logits_indices"][: layout.num_logits] = layout.logits_indices
        if moved:
            host["query_start"][: requests + 1] = layout.query_start
            host["query_start"][requests + 1 :] = tokens
            side.counts = layout.counts
        tables, before = host["block_tables"], side.blocks
        for row, blocks in enumerate(layout.blocks):
            if before[row] != blocks:  # most requests get a block in few of their steps
                tables[row, : len(blocks)] = blocks
                before[row] = list(blocks)
        if self._tile_rows:
            self._fill_split(layout)
        self._fill_draws(draws)
        if self._encoded_positions:
            self._fill_encoded(layout, moved=moved)

    def fill_padding(self) -> None:
        """Make every row padding: one token per request, each of which wants logits."""
        self.fill(EMPTY)
        self._sides[self._turn].counts = None
        self.host["query_start"][:] = range(self.num_requests + 1)
        self.host["logits_indices"][:] = range(len(self.host["logits_indices"]))

    def upload(self, feed: TokenFeed | None = None) -> None:
        """Send the host side to the device; nothing waits for it. ``feed``: where the step leaves tokens."""
        side = self._sides[self._turn]
        if side.sent is not None:
            self._send(side, *((None, 0) if feed is None else (feed.sent.side, feed.turn)))
            side.sent.record(torch.cuda.current_stream(self._device.device))  # without, torch looks for it

    def wait_until_read(self) -> None:
        """Wait until the device has read what was uploaded. To be called before a buffer is dropped: PyTorch
        does not know that a kernel reads its pinned memory, and would give it to others.
        """
        for sent in (side.sent for side in self._sides if side.sent is not None):
            with suppress(RuntimeError):  # a device that has failed reads no more; its error is another's
                sent.synchronize()

    def _send(self, side: _StepSide, place: torch.Tensor | None, turn: int) -> None:
        upload_step(side.words, self._device.view(torch.int32), place, turn)

    def _fill_split(self, layout: StepLayout) -> None:
        """Tiles whose queries see most keys come first, as they take longest; so those in parts are first."""
        host, rows, single = self.host, self._tile_rows, layout.num_single if self._splits else 0
        host["decode_lens"].fill(0)
        host["decode_lens"][:single] = layout.seq_lens[:single]
        counts, lens = layout.counts, layout.seq_lens
        tiles = [
            (lens[request] - count + min(first + rows, count), request, first // rows)
            for request, count in enumerate(counts[single:], start=single)
            for first in range(0, count, rows)
        ]
        tiles = sorted(tiles, reverse=True)
        parts = parts_of([keys for keys, *_ in tiles], self._tile_parts)
        listed = [
            (request, tile, part, count)
            for (_, request, tile), count in zip(tiles, parts, strict=True)
            for part in range(count)
        ]
        host["tile_list"][:] = (0, NO_TILE, 0, 1)
        if listed:
            host["tile_list"][: len(listed)] = listed

    def _fill_encoded(self, layout: StepLayout, *, moved: bool) -> None:
        """``moved``: rows belong to other requests than in the step before on this host side."""
        side = self._sides[self._turn]
        host, before, given = side.arrays, side.encoded, layout.inputs.encoded_tables
        if moved:
            host["encoded_rows"].fill(self.num_requests)
            host["encoded_rows"][: layout.num_tokens] = np.repeat(
                np.arange(layout.num_requests), layout.counts
            )
        if len(given) == len(before) and all(map(is_, given, before)):
            return
        for row, table in enumerate(given):
            if row >= len(before) or before[row] is not table:
                host["encoded_tables"][row, : len(table)] = table
        host["encoded_lens"][: len(given)] = layout.inputs.encoded_lens
        host["encoded_lens"][len(given) :] = 0
        side.encoded = given

    def _fill_draws(self, draws: Sequence[RowSampling]) -> None:
        host = self.host
        host["temperature"].fill(0.0)
        host["longs"][_FIRST_RULE : _FIRST_RULE + len(RULES)] = -1
        blocks: tuple[str, ...] = ()
        if any(max(draw.slot, draw.mask, draw.transcript, draw.probed) >= 0 for draw in draws):
            blocks = ("longs", "doubles")
        elif any(draw.temperature > 0 for draw in draws):
            blocks = ("draw_longs", "draw_doubles")
        if blocks:
            columns = list(zip(*draws, strict=True))
            for block in blocks:
                host[block][:, : len(draws)] = _COLUMNS[block](columns)
