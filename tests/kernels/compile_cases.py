"""Every kernel's launchers on meta tensors, which hold no data: what compile_kernels.py compiles.

CASES["norms 4096 fp16"]()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.norm.layer_norm import layer_norm
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.few_rows.small_gate_up import small_gate_up
from ingot.kernels.product.few_rows.small_linear import small_linear, small_linear_parts
from ingot.kernels.product.invariant_linear import NAMES, TILE_LIST, invariant_linear
from ingot.kernels.rows.step_upload import upload_step
from ingot.kernels.sampling.feed_tokens import Sent, keep_tokens, take_tokens
from ingot.kernels.sampling.masked_tokens import mask_tokens
from ingot.kernels.sampling.row_logprobs import greedy_logprobs, logprobs
from ingot.kernels.sampling.timestamp_rules import TranscriptRows, TranscriptTables, hold_transcripts
from ingot.kernels.sampling.token_draw import draw, greedy
from ingot.kernels.sampling.token_penalties import BiasTable, penalize
from ingot.kernels.weight.dequantize import dequantize
from ingot.kernels.weight.host_rows import host_rows
from ingot.kernels.weight.stored_weight import StoredWeight, num_rows, num_words
from tests.kernels.flat_calls import (
    invariant_attention_triton,
    paged_attention_triton,
    prefill_attention_triton,
    rope_kv_write_triton,
    small_qkv_triton,
)
from tests.kernels.numerics import launched

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
DOUBLE, LONG = torch.float64, torch.int64


def empty(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def in_8(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What receives attention's output in 8 bits."""
    return torch.empty_like(q, dtype=torch.int8), empty(*q.shape[:2], dtype=FULL)


def norms(dtype: torch.dtype, hidden: int, residual: bool, overlap: int = 1) -> None:
    x, weight = empty(4, hidden, dtype=dtype), empty(hidden, dtype=dtype)
    launched(rms_norm)(x, weight, 1e-6, x if residual else None, {"OVERLAP": overlap})
    launched(layer_norm)(x, weight, weight, 1e-6, x if residual else None, {"OVERLAP": overlap})


def rope(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: int,
    norm: bool,
    logn: int,
    overlap: int = 1,
) -> None:
    index = empty(4, dtype=torch.int64)
    weight = empty(head_dim, dtype=dtype) if norm else None
    cache = empty(100, kv_heads, 64, head_dim, dtype=dtype)
    qkv = empty(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    table = empty(100, rotary, dtype=FULL) if rotary else None
    place = (table, index, index, index, cache, cache, heads, kv_heads, head_dim)
    rope_kv_write_triton(qkv, *place, weight, weight, 1e-6, logn, {"OVERLAP": overlap})


def decode(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    longest: int,
    window: int,
    overlap: int = 1,
    batch: int = 4,
    narrow: bool = False,
) -> None:
    cache = empty(100, kv_heads, block_size, head_dim, dtype=dtype)
    tables, lengths = empty(batch, 64, dtype=torch.int32), empty(batch, dtype=torch.int32)
    q = empty(batch, heads, head_dim, dtype=dtype)
    tiles, out = {"OVERLAP": overlap}, in_8(q) if narrow else (None, None)
    place = (q, cache, cache, tables, lengths, 0.1, longest, window, tiles)
    paged_attention_triton(*place, out=out[0], out_scales=out[1])


def prefill(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    longest: int,
    window: int,
    tiles: dict[str, int] | None = None,
    narrow: bool = False,
    listed: int = 0,
    parts: int = 0,
) -> None:
    cache = empty(100, kv_heads, block_size, head_dim, dtype=dtype)
    tables, lengths = empty(4, 64, dtype=torch.int32), empty(4, dtype=torch.int32)
    bounds = empty(5, dtype=torch.int32)
    q = empty(4 * longest, heads, head_dim, dtype=dtype)
    place = (q, cache, cache, tables, bounds, lengths, longest, 0.1, window, tiles)
    tile_list = empty(listed, 4, dtype=torch.int32) if listed else None
    prefill_attention_triton(*place, *(in_8(q) if narrow else ()), tile_list=tile_list, parts=parts)


def invariant_attend(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, longest: int, window: int
) -> None:
    """A step of decodes and one of prompts."""
    cache = empty(100, kv_heads, block_size, head_dim, dtype=dtype)
    tables, lengths = empty(4, 64, dtype=torch.int32), empty(4, dtype=torch.int32)
    for queries in (1, longest):
        q = empty(4 * queries, heads, head_dim, dtype=dtype)
        place = (cache, cache, tables, empty(5, dtype=torch.int32), lengths)
        invariant_attention_triton(q, *place, queries, 4096, 0.1, window)


def invariant(dtype: torch.dtype, rows: int, outputs: int, width: int) -> None:
    x, w, bias = (empty(*size, dtype=dtype) for size in ((rows, width), (outputs, width), (outputs,)))
    launched(invariant_linear)(x, w, bias)


def invariant_tiles(dtype: torch.dtype, choices: Iterable[tuple[int, ...]]) -> None:
    for tiles in choices:
        x, w = (empty(*size, dtype=dtype) for size in ((500, 1024), (768, 1024)))
        launched(invariant_linear)(x, w, None, dict(zip(NAMES, tiles, strict=True)))


def linear(dtype: torch.dtype, rows: int, outputs: int, width: int, overlap: int = 1) -> None:
    x, y, w = (empty(*size, dtype=dtype) for size in ((rows, width), (rows, outputs), (outputs, width)))
    bias, norm = empty(outputs, dtype=dtype), empty(width, dtype=dtype)
    launched(small_linear)(x, w, None, y, tiles={"OVERLAP": overlap})
    launched(small_linear)(x, w, bias, None, norm, 1e-6, {"OVERLAP": overlap})
    launched(small_linear)(x, w, bias, tiles={"OVERLAP": overlap}, activation="gelu")


def split_sums(dtype: torch.dtype, rows: int, width: int, overlap: int = 1, outputs: int = 4096) -> None:
    x, w = empty(rows, width, dtype=dtype), empty(outputs, width, dtype=dtype)
    parts = launched(small_linear_parts)(x, w, {"OVERLAP": overlap})
    residual, norm = empty(rows, outputs, dtype=dtype), empty(outputs, dtype=dtype)
    launched(sum_norm)(parts, residual, norm, 1e-6, norm, {"OVERLAP": overlap})


def gate_up(dtype: torch.dtype, rows: int, inner: int, width: int, overlap: int = 1, **tiles: int) -> None:
    w, norm = empty(2 * inner, width, dtype=dtype), empty(width, dtype=dtype)
    launched(small_gate_up)(empty(rows, width, dtype=dtype), w, norm, 1e-6, {"OVERLAP": overlap, **tiles})


def in_bits(bits: int, outputs: int, width: int, group: int, zeros: bool, dtype: torch.dtype) -> StoredWeight:
    """An empty weight of few bits."""
    shape = (-(-width // group), outputs) if group else (outputs,)
    scales, low = empty(*shape, dtype=dtype), empty(*shape, dtype=torch.uint8) if zeros else None
    values = empty(num_rows(outputs), num_words(width, bits, group), dtype=torch.int16)
    return StoredWeight(values, width, scales, low, bits, group)


def narrow(
    dtype: torch.dtype, rows: int, bits: int, group: int = 0, zeros: bool = False, **tiles: int
) -> None:
    """Every small product of a weight in few bits."""

    def weight(outputs: int, width: int) -> StoredWeight:
        return in_bits(bits, outputs, width, group, zeros, dtype)

    x, inner, norm = empty(rows, 4096, dtype=dtype), empty(rows, 11008, dtype=dtype), empty(4096, dtype=dtype)
    launched(small_linear)(inner, weight(4096, 11008), None, x, tiles=tiles)
    launched(small_gate_up)(x, weight(22016, 4096), norm, 1e-6, tiles)
    index, cache = empty(rows, dtype=torch.int64), empty(100, 32, 64, 128, dtype=dtype)
    place = (empty(100, 128, dtype=FULL), index, index, index, cache, cache, 32, 32, 128)
    small_qkv_triton(x, weight(12288, 4096), None, norm, 1e-6, *place, tiles=tiles)
    launched(small_linear_parts)(x, weight(4096, 4096), tiles)


def widened(dtype: torch.dtype, bits: int, group: int = 0, zeros: bool = False, width: int = 4096) -> None:
    launched(dequantize)(in_bits(bits, 12288, width, group, zeros, dtype), dtype)


def gathered(dtype: torch.dtype, width: int) -> None:
    launched(host_rows)(empty(32000, width, dtype=dtype), empty(8, dtype=LONG))


def qkv(dtype: torch.dtype, rows: int, kv_heads: int, head_dim: int, rotary: int, overlap: int = 1) -> None:
    index, outputs = empty(rows, dtype=torch.int64), (32 + 2 * kv_heads) * head_dim
    cache, norm = empty(100, kv_heads, 64, head_dim, dtype=dtype), empty(4096, dtype=dtype)
    x, w, bias = (
        empty(rows, 4096, dtype=dtype),
        empty(outputs, 4096, dtype=dtype),
        empty(outputs, dtype=dtype),
    )
    place = (empty(100, rotary, dtype=FULL), index, index, index, cache, cache, 32, kv_heads, head_dim)
    small_qkv_triton(x, w, bias, norm, 1e-6, *place, 2048, tiles={"OVERLAP": overlap})


def feed() -> None:
    ids = empty(8, dtype=torch.int64)
    launched(take_tokens)(ids, ids, ids)
    launched(keep_tokens)(ids, empty(8, dtype=FULL), ids)
    launched(keep_tokens)(ids, empty(8, dtype=FULL), ids, empty(8, 151936, dtype=torch.int16), ids)
    sent = Sent(empty(2, 64, dtype=LONG), empty(1, dtype=torch.int32))
    launched(keep_tokens)(ids, empty(8, dtype=FULL), ids, sent=sent)


def upload() -> None:
    out, side = empty(3001, dtype=torch.int32), empty(1, dtype=torch.int32)
    launched(upload_step)(out, out)
    launched(upload_step)(out, out, side, 1)


def penalties(dtype: torch.dtype, rows: int, vocab: int, counts: torch.dtype) -> None:
    number, integer = empty(rows, dtype=DOUBLE), empty(rows, dtype=LONG)
    state = empty(64, vocab, dtype=counts)
    logits = empty(rows, vocab, dtype=dtype)
    rules = (integer, number, number, number, integer, integer)
    bias = BiasTable(empty(64, 1024, dtype=torch.int32), empty(64, 1024, dtype=DOUBLE))
    launched(penalize)(logits, state, *rules)
    launched(penalize)(logits, state, *rules, bias, integer)


def masks(rows: int, vocab: int) -> None:
    table = empty(64, -(-vocab // 32), dtype=torch.int32)
    launched(mask_tokens)(empty(rows, vocab, dtype=FULL), table, empty(rows, dtype=LONG))


def transcripts(dtype: torch.dtype, rows: int, vocab: int) -> None:
    tables = TranscriptTables(empty(128, -(-vocab // 32), dtype=torch.int32), empty(64, 2, dtype=LONG))
    column = empty(rows, dtype=LONG)
    launched(hold_transcripts)(empty(rows, vocab, dtype=dtype), tables, TranscriptRows(*[column] * 5))


def likeliest(dtype: torch.dtype, rows: int, vocab: int) -> None:
    logits, ids, out = empty(rows, vocab, dtype=dtype), empty(rows, dtype=LONG), empty(64, 41, dtype=DOUBLE)
    launched(logprobs)(logits, ids, out)
    launched(logprobs)(logits, ids, out[:, :3])
    launched(greedy_logprobs)(logits, out)


def sampling(dtype: torch.dtype, rows: int, vocab: int, select: bool, overlap: int = 1) -> None:
    logits, number, integer = (
        empty(rows, vocab, dtype=dtype),
        empty(rows, dtype=DOUBLE),
        empty(rows, dtype=LONG),
    )
    parameters = (number, integer, number, number, integer, integer)
    launched(greedy)(logits, {"OVERLAP": overlap})
    launched(draw)(logits, *parameters, select, {"OVERLAP": overlap})


CASES: dict[str, Callable[[], Any]] = {
    "token feed": feed,
    "step upload": upload,
    "penalties 32 of 151936 bf16": lambda: penalties(BRAIN, 32, 151936, torch.int16),
    "penalties 1 of 50257 fp32": lambda: penalties(FULL, 1, 50257, torch.int32),
    "masks 32 of 151936": lambda: masks(32, 151936),
    "masks 1 of 50257": lambda: masks(1, 50257),
    "transcripts 64 of 51866 fp16": lambda: transcripts(HALF, 64, 51866),
    "transcripts 1 of 51864 fp32": lambda: transcripts(FULL, 1, 51864),
    "log-probabilities 32 of 151936 bf16": lambda: likeliest(BRAIN, 32, 151936),
    "log-probabilities 1 of 256000 fp32": lambda: likeliest(FULL, 1, 256000),
    "norms 4096 fp16": lambda: norms(HALF, 4096, True),
    "norms 768 fp32": lambda: norms(FULL, 768, False),
    "norms 16384 bf16": lambda: norms(BRAIN, 16384, True),
    "silu_mul 11008 bf16": lambda: launched(silu_mul)(empty(4, 22016, dtype=BRAIN)),
    "silu_mul 100 fp32": lambda: launched(silu_mul)(empty(4, 200, dtype=FULL)),
    "rope qwen fp16": lambda: rope(HALF, 32, 32, 128, 128, False, 8192),
    "rope qwen3 bf16": lambda: rope(BRAIN, 32, 8, 128, 128, True, 0),
    "rope gpt2 fp32": lambda: rope(FULL, 12, 12, 64, 0, False, 0),
    "rope of no queries fp16": lambda: rope(HALF, 0, 20, 64, 0, False, 0),
    "rope partial fp16": lambda: rope(HALF, 32, 32, 80, 32, False, 0),
    "decode 32x128 fp16": lambda: decode(HALF, 32, 32, 128, 64, 4096, 0),
    "decode 32/8x128 bf16": lambda: decode(BRAIN, 32, 8, 128, 64, 4096, 0),
    "decode 28/4x128 fp16": lambda: decode(HALF, 28, 4, 128, 16, 4096, 0),
    "decode 12x64 fp32": lambda: decode(FULL, 12, 12, 64, 64, 1024, 0),
    "decode 14/2x64 fp32": lambda: decode(FULL, 14, 2, 64, 64, 100, 0),
    "decode window 32/8x96": lambda: decode(HALF, 32, 8, 96, 64, 4096, 2048),
    "decode window 32x256": lambda: decode(HALF, 32, 32, 256, 64, 100, 50),
    "decode 32x128 fp16 alone": lambda: decode(HALF, 32, 32, 128, 64, 4096, 0, 1, 1),
    "decode 16x64 fp16 alone": lambda: decode(HALF, 16, 16, 64, 64, 4096, 0, 1, 1),
    "decode 32x80 bf16 alone": lambda: decode(BRAIN, 32, 32, 80, 64, 4096, 0, 1, 1),
    "decode 16x256 bf16 alone": lambda: decode(BRAIN, 16, 16, 256, 16, 4096, 0, 1, 1),
    "decode 32/8x128 fp16 of 8": lambda: decode(HALF, 32, 8, 128, 64, 4096, 0, 1, 8),
    "decode 32/8x128 fp16 of 64": lambda: decode(HALF, 32, 8, 128, 64, 4096, 0, 1, 64),
    "decode 32/8x80 fp16 window of 64": lambda: decode(HALF, 32, 8, 80, 16, 4096, 2048, 1, 64),
    "decode 16/8x256 bf16 of 8": lambda: decode(BRAIN, 16, 8, 256, 64, 4096, 0, 1, 8),
    "decode 8/1x256 bf16 alone": lambda: decode(BRAIN, 8, 1, 256, 64, 4096, 0, 1, 1),
    "decode 32/8x128 fp32 alone": lambda: decode(FULL, 32, 8, 128, 64, 4096, 0, 1, 1),
    "decode 32/8x128 fp32 of 8": lambda: decode(FULL, 32, 8, 128, 64, 4096, 0, 1, 8),
    "decode 32/8x64 fp32 of 64": lambda: decode(FULL, 32, 8, 64, 64, 4096, 0, 1, 64),
    "prefill 32x128 fp16": lambda: prefill(HALF, 32, 32, 128, 64, 2048, 0),
    "prefill 32/8x128 bf16 short": lambda: prefill(BRAIN, 32, 8, 128, 64, 16, 0),
    "prefill 28/4x128 fp16 mid": lambda: prefill(HALF, 28, 4, 128, 16, 64, 0),
    "prefill 12x64 fp32": lambda: prefill(FULL, 12, 12, 64, 64, 512, 0),
    "prefill 32x128 fp32": lambda: prefill(FULL, 32, 32, 128, 64, 512, 0),
    "prefill window 32x80 bf16": lambda: prefill(BRAIN, 32, 32, 80, 64, 512, 256),
    "decode 32x128 fp16 of 64 to 8 bits": lambda: decode(HALF, 32, 32, 128, 64, 4096, 0, 1, 64, True),
    "decode 32x128 bf16 alone to 8 bits": lambda: decode(BRAIN, 32, 32, 128, 64, 4096, 0, 1, 1, True),
    "decode 32/8x128 fp16 of 64 to 8 bits": lambda: decode(HALF, 32, 8, 128, 64, 4096, 0, 1, 64, True),
    "decode 32/8x128 bf16 alone to 8 bits": lambda: decode(BRAIN, 32, 8, 128, 64, 4096, 0, 1, 1, True),
    "prefill 32x128 fp16 by a list": lambda: prefill(HALF, 32, 32, 128, 64, 2048, 0, listed=96),
    "prefill 32x128 fp16 in parts": lambda: prefill(HALF, 32, 32, 128, 64, 128, 0, listed=74, parts=8),
    "prefill 32/8x80 bf16 window in parts": lambda: prefill(
        BRAIN, 32, 8, 80, 64, 64, 256, listed=74, parts=8
    ),
    "prefill 12x64 fp32 in parts": lambda: prefill(FULL, 12, 12, 64, 64, 128, 0, listed=88, parts=22),
    "prefill 8x256 bf16 in parts to 8 bits": lambda: prefill(
        BRAIN, 8, 8, 256, 64, 64, 0, None, True, listed=40, parts=33
    ),
    "prefill 32x128 fp16 to 8 bits": lambda: prefill(HALF, 32, 32, 128, 64, 2048, 0, None, True),
    "prefill 32/8x80 bf16 to 8 bits": lambda: prefill(BRAIN, 32, 8, 80, 64, 512, 256, None, True),
    "small_linear 1 fp16": lambda: linear(HALF, 1, 4096, 11008),
    "small_linear 8 bf16": lambda: linear(BRAIN, 8, 151936, 4096),
    "small_linear 16 fp32": lambda: linear(FULL, 16, 768, 3072),
    "small_gate_up 1 bf16": lambda: gate_up(BRAIN, 1, 11008, 4096),
    "small_gate_up 16 fp16": lambda: gate_up(HALF, 16, 11008, 4096),
    "small_qkv 1 fp16": lambda: qkv(HALF, 1, 32, 128, 128),
    "small_qkv 8 bf16 partial": lambda: qkv(BRAIN, 8, 8, 80, 32),
    "sampling 64 of 151936 fp16": lambda: sampling(HALF, 64, 151936, True),
    "sampling 1 of 50257 fp32": lambda: sampling(FULL, 1, 50257, True),
    "sampling 3 of 32000 bf16 without a selection": lambda: sampling(BRAIN, 3, 32000, False),
    "small_qkv 64 fp16": lambda: qkv(HALF, 64, 32, 128, 128),
    "small_gate_up 32 bf16": lambda: gate_up(BRAIN, 32, 11008, 4096),
    "small_linear 64 fp16": lambda: linear(HALF, 64, 151936, 4096),
    "small_linear 64 fp16 narrow": lambda: linear(HALF, 64, 768, 768),
    "small_linear 64 fp16 less narrow": lambda: linear(HALF, 64, 3840, 1280),
    "split sums 64 fp16 narrow": lambda: split_sums(HALF, 64, 3072, outputs=768),
    "split sums 8 fp16": lambda: split_sums(HALF, 8, 4096),
    "split sums 64 bf16": lambda: split_sums(BRAIN, 64, 11008),
    "split sums 64 fp32": lambda: split_sums(FULL, 64, 768),
    "invariant_linear 1 fp16": lambda: invariant(HALF, 1, 4096, 11008),
    "invariant_linear 32 bf16": lambda: invariant(BRAIN, 32, 22016, 4096),
    "invariant_linear 2048 fp16": lambda: invariant(HALF, 2048, 12288, 4096),
    "invariant_linear 5 fp32": lambda: invariant(FULL, 5, 768, 3072),
    "invariant_linear 300 bf16 odd": lambda: invariant(BRAIN, 300, 100, 1008),
    "invariant_linear tiles bf16": lambda: invariant_tiles(BRAIN, TILE_LIST[:-1]),
    "invariant attention 32x128 fp16": lambda: invariant_attend(HALF, 32, 32, 128, 64, 2048, 0),
    "invariant attention 28/4x128 bf16": lambda: invariant_attend(BRAIN, 28, 4, 128, 16, 64, 0),
    "invariant attention 12x64 fp32": lambda: invariant_attend(FULL, 12, 12, 64, 64, 512, 0),
    "invariant attention window 32/8x96 fp16": lambda: invariant_attend(HALF, 32, 8, 96, 64, 16, 200),
    "invariant attention 8x256 bf16": lambda: invariant_attend(BRAIN, 8, 8, 256, 64, 512, 0),
    "8 bits 8 bf16": lambda: narrow(BRAIN, 8, 8),
    "8 bits 64 fp16": lambda: narrow(HALF, 64, 8),
    "8 bits 4 fp32": lambda: narrow(FULL, 4, 8),
    "4 bits 1 fp16 by 128": lambda: narrow(HALF, 1, 4, 128),
    "4 bits 8 bf16 by 64 with zeros": lambda: narrow(BRAIN, 8, 4, 64, True),
    "4 bits 32 fp16 by 32 with zeros": lambda: narrow(HALF, 32, 4, 32, True),
    "4 bits 64 bf16 by channel": lambda: narrow(BRAIN, 64, 4, 0),
    "dequantize 8 bits fp16": lambda: widened(HALF, 8),
    "dequantize 4 bits bf16 by 128 with zeros": lambda: widened(BRAIN, 4, 128, True, 11008),
    "dequantize 4 bits fp32 by 32": lambda: widened(FULL, 4, 32, False, 1000),
    "host rows 4096 fp16": lambda: gathered(HALF, 4096),
    "host rows 1000 fp32": lambda: gathered(FULL, 1000),
    "prefill 8x256 bf16": lambda: prefill(BRAIN, 8, 8, 256, 64, 512, 0),
}


OVERLAPPING: dict[str, Callable[[], Any]] = {  # sm_90 and later
    "small_linear 1 fp16 overlapping": lambda: linear(HALF, 1, 4096, 4096, 2),
    "small_gate_up 8 fp16 overlapping": lambda: gate_up(HALF, 8, 11008, 4096, 2),
    "small_gate_up 64 fp16 overlapping, asked ahead": lambda: gate_up(HALF, 64, 11008, 4096, 2, PREFETCH=512),
    "small_qkv 64 fp16 overlapping": lambda: qkv(HALF, 64, 32, 128, 128, 2),
    "split sums 8 fp16 overlapping": lambda: split_sums(HALF, 8, 11008, 2),
    "split sums 32 fp16 overlapping": lambda: split_sums(HALF, 32, 4096, 2),
    "small_qkv 1 bf16 overlapping": lambda: qkv(BRAIN, 1, 32, 128, 128, 2),
    "sampling 1 of 151936 fp16 overlapping": lambda: sampling(HALF, 1, 151936, True, 2),
    "norms 4096 fp16 overlapping": lambda: norms(HALF, 4096, True, 2),
    "silu_mul 11008 fp16 overlapping": lambda: launched(silu_mul)(empty(4, 22016), {"OVERLAP": 2}),
    "rope qwen fp16 overlapping": lambda: rope(HALF, 32, 32, 128, 128, False, 0, 2),
    "8 bits 8 fp16 overlapping": lambda: narrow(HALF, 8, 8, OVERLAP=2),
    "4 bits 8 fp16 by 128 overlapping": lambda: narrow(HALF, 8, 4, 128, OVERLAP=2),
    "4 bits 1 bf16 by 128 with zeros overlapping": lambda: narrow(BRAIN, 1, 4, 128, True, OVERLAP=4),
    "4 bits 64 fp16 by 128 with zeros overlapping": lambda: narrow(HALF, 64, 4, 128, True, OVERLAP=2),
    "4 bits 32 fp16 by 128 overlapping, 2 ahead": lambda: narrow(HALF, 32, 4, 128, OVERLAP=2, PREFETCH=2),
    "prefill 32x128 fp16 overlapping": lambda: prefill(HALF, 32, 32, 128, 64, 2048, 0, {"OVERLAP": 2}),
    "prefill 16x64 fp16 overlapping": lambda: prefill(HALF, 16, 16, 64, 64, 512, 0, {"OVERLAP": 2}),
    "invariant_linear deepest tiles": lambda: invariant_tiles(HALF, TILE_LIST[-1:]),
    "decode 32x128 fp16 overlapping": lambda: decode(HALF, 32, 32, 128, 64, 4096, 0, 2),
    "decode 32x128 bf16 fetching early": lambda: decode(BRAIN, 32, 32, 128, 64, 4096, 0, 4),
    "decode 32x80 fp16 fetching early": lambda: decode(HALF, 32, 32, 80, 16, 4096, 0, 4),
    "decode 32x128 fp16 alone fetching early": lambda: decode(HALF, 32, 32, 128, 64, 4096, 0, 4, 1),
    "decode 32x128 bf16 two fetching early": lambda: decode(BRAIN, 32, 32, 128, 64, 4096, 0, 4, 2),
    "decode 16x64 fp16 alone fetching early": lambda: decode(HALF, 16, 16, 64, 64, 4096, 0, 4, 1),
    "decode 32/8x128 fp16 alone fetching early": lambda: decode(HALF, 32, 8, 128, 64, 4096, 0, 4, 1),
    "decode 16x256 bf16 alone fetching early": lambda: decode(BRAIN, 16, 16, 256, 64, 4096, 0, 4, 1),
    "decode 32x80 fp16 two fetching early": lambda: decode(HALF, 32, 32, 80, 64, 4096, 0, 4, 2),
    "decode 12x64 fp32 alone fetching early": lambda: decode(FULL, 12, 12, 64, 64, 4096, 0, 4, 1),
    "decode 28/4x128 bf16 of 64 fetching early": lambda: decode(BRAIN, 28, 4, 128, 64, 4096, 0, 4, 64),
    "decode 32/8x128 bf16 of 64 fetching early": lambda: decode(BRAIN, 32, 8, 128, 64, 4096, 0, 4, 64),
    "decode 32x128 fp16 fetching early": lambda: decode(HALF, 32, 32, 128, 64, 4096, 0, 4),
    "decode 32x128 fp16 of 8 to 8 bits early": lambda: decode(HALF, 32, 32, 128, 64, 4096, 0, 4, 8, True),
    "decode 32x256 fp32 fetching early": lambda: decode(FULL, 32, 32, 256, 64, 4096, 100, 4),
}
