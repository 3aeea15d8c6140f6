"""Bytes that steps keep on the device, by formula: buffers, layered chunks, sampling, CUDA graphs."""

from __future__ import annotations

from functools import lru_cache

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import MAX_BIASES, MAX_LOGPROBS
from ingot.config.step_sizes import (
    LAYERED_TOKENS,
    LOGITS_AT_ONCE,
    TOKEN_BUCKETS,
    batch_buckets,
    draw_kinds,
    most_tokens,
    request_buckets,
    tile_list_length,
)
from ingot.kernels.sampling.token_penalties import count_dtype
from ingot.kernels.tiles.prefill_tiles import TILES_HALF
from ingot.kernels.tiles.single_tiles import TARGET_PROGRAMS

_PER_TOKEN_FIELDS = 5  # int64: id, position, rotary row, slot, row of the token feed
# 8 bytes each: temperature, top-p, min-p, top-k, seed, step, slot, mask, five rules, four of transcripts
_DRAW_FIELDS = 17
_BIAS_BYTES = 12  # of a token: its id and a float64
_DRAW_ROW_BYTES = 2048 * 12 + 1024 * 4 + 256 * 28 + 64  # histogram, listed scores, figures of 256 tiles
_LOGPROBS_ROW_BYTES = 96 * (MAX_LOGPROBS + 1) * 8  # likeliest tokens and the sum of 96 tiles
_GRAPH_LAYER_BYTES = 128 << 10  # some 10 launches per layer
_REFERENCE_DRAW_BYTES = 64  # of temporaries per logit
_LEAST_TILE_ROWS = 16  # queries of a tile of attention: lists of tiles are no longer than with these


def step_buffer_bytes(
    tokens: int,
    requests: int,
    table_width: int,
    logits: int,
    kv_heads: int,
    *,
    buffers: int = 1,
    encoded_width: int = 0,
    tiles: int = 0,
) -> int:
    """Bytes of one step's tensors (``StepBuffer``) on the device; of several buffers by their sums. Its list
    holds so many ``tiles``, some of which may be in parts.
    """
    eight = _PER_TOKEN_FIELDS * tokens + logits + _DRAW_FIELDS * (logits if encoded_width else requests)
    four = requests * table_width + 2 * requests + buffers
    if encoded_width:  # a request's blocks in the encoder cache and their positions; a token's request
        eight += tokens
        four += (requests + buffers) * (encoded_width + 1)
    counts = requests * kv_heads
    if tiles:
        four += 4 * tiles + requests
        counts = max(counts, TARGET_PROGRAMS)
    return 8 * eight + 4 * four + 4 * counts


def all_step_buffers_bytes(
    config: DecoderConfig, runtime: RuntimeConfig, max_batch_size: int, max_seq_len: int, *, graphs: bool
) -> int:
    """Bytes of every step buffer: one for eager steps and, with graphs, one for each bucket."""
    width = -(-max_seq_len // runtime.block_size)
    tokens = most_tokens(runtime.step_budget, max_batch_size)
    heads = config.num_kv_heads
    encoder = config.encoder if config.crosses else None
    encoded = 0 if encoder is None else -(-encoder.max_positions // runtime.block_size)
    probes = 2 if encoded else 1  # rows of logits of a request, one of which may be a probe's
    logits = max(tokens, probes * max_batch_size)
    total = step_buffer_bytes(tokens, max_batch_size, width, logits, heads, encoded_width=encoded)
    return total + (
        _graph_buffers_bytes(max_batch_size, width, heads, config.num_heads, encoded) if graphs else 0
    )


@lru_cache(maxsize=1 << 12)  # a search for what fits asks again for each card and number format
def _graph_buffers_bytes(
    max_batch_size: int, width: int, heads: int, query_heads: int, encoded_width: int
) -> int:
    """Bytes of the step buffers of all graphs."""
    buckets, probes = batch_buckets(max_batch_size), 2 if encoded_width else 1
    rows = sum(buckets)
    total = step_buffer_bytes(
        rows, rows, width, rows, heads, buffers=len(buckets), encoded_width=encoded_width
    )
    return total + sum(
        step_buffer_bytes(
            *(t, r, width, probes * r, heads),
            encoded_width=encoded_width,
            tiles=_most_tiles(query_heads, t, r),
        )
        for t in TOKEN_BUCKETS
        for r in request_buckets(max_batch_size)
    )


def layered_share(config: DecoderConfig, runtime: RuntimeConfig) -> float | None:
    """Share of a step's time for layered chunks; None: there are none, as in speech models."""
    return runtime.prompt_share if config.modality.takes_text else None


def layered_bytes(config: DecoderConfig, dtype: torch.dtype, runtime: RuntimeConfig, max_seq_len: int) -> int:
    """Bytes of such a chunk: a step buffer for each of its sizes, and between two steps the hidden states of
    the largest, before and after their norm.
    """
    if layered_share(config, runtime) is None:
        return 0
    width = -(-max_seq_len // runtime.block_size)
    buffers = sum(
        step_buffer_bytes(
            *(rows, 1, width, 1, config.num_kv_heads), tiles=_most_tiles(config.num_heads, rows, 1)
        )
        for rows in LAYERED_TOKENS
    )
    return buffers + 2 * LAYERED_TOKENS[-1] * config.hidden_size * dtype.itemsize


def _most_tiles(query_heads: int, tokens: int, requests: int) -> int:
    """Entries of a step's list of tiles, parts included."""
    return max(tile_list_length(tokens, requests, _LEAST_TILE_ROWS), TARGET_PROGRAMS // query_heads)


def sampling_bytes(
    config: DecoderConfig, max_batch_size: int, max_seq_len: int, *, kernels: bool = True
) -> int:
    """Bytes of a full batch's draw: histograms, tiles' figures; or the PyTorch reference's 64-bit
    temporaries. And of the token counts, biases and masks, which are made when a request first needs them.
    """
    logits = max_batch_size * config.vocab_size
    counts = logits * count_dtype(max_seq_len).itemsize + max_batch_size * MAX_BIASES * _BIAS_BYTES
    counts += -(-logits // 8) * (1 if config.modality.takes_text else 3)  # masks; of transcripts two for each
    if kernels:
        return counts + max_batch_size * (_DRAW_ROW_BYTES + _LOGPROBS_ROW_BYTES)
    return counts + min(logits, LOGITS_AT_ONCE) * _REFERENCE_DRAW_BYTES


def graph_bytes(config: DecoderConfig, dtype: torch.dtype, max_batch_size: int) -> int:
    """An estimate of the bytes of all CUDA graphs that can be captured.

    Each graph takes 128 KiB per layer of the driver's (an estimate, which benchmarks/memory.py is there to
    replace). All decode graphs share the activations and logits of the largest, and these penalized, in fp32;
    all graphs of steps with prompts those of the most tokens, T e (2 H + max(3 I, 2 Q + 2 K)), their logits,
    and what the parts of attention's tiles leave in fp32.
    """
    buckets, requests = batch_buckets(max_batch_size), request_buckets(max_batch_size)
    graphs = len(buckets) * len(draw_kinds(config.modality)) + len(TOKEN_BUCKETS) * len(requests)
    wide = max(3 * config.intermediate_size, 2 * config.q_size + 2 * config.kv_size)
    step = (2 * config.hidden_size + wide) * dtype.itemsize
    logits = (buckets[-1] + requests[-1]) * config.vocab_size * dtype.itemsize
    changed = 1 if config.modality.takes_text else 2  # by transcripts, then by penalties
    logits += changed * buckets[-1] * config.vocab_size * torch.float32.itemsize
    driver = graphs * config.num_layers * _GRAPH_LAYER_BYTES
    parts = TARGET_PROGRAMS * TILES_HALF["BLOCK_M"] * (config.head_dim + 1) * torch.float32.itemsize
    return driver + parts + (TOKEN_BUCKETS[-1] + buckets[-1]) * step + logits
