"""Bytes of each part of an engine by formula: weights, KV cache, rotary table, activations, encoder cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.config.half_dtypes import HalfDtypes
from ingot.config.quantization.quant_config import HEAD, QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import (
    ENCODED_AT_ONCE,
    most_logits,
    most_tokens,
)
from ingot.device import dtype_name, parse_dtype
from ingot.kernels.attention.score_exponents import capped_rows
from ingot.kernels.cache.cache_scales import NARROW_CACHES, SCALE_BYTES
from ingot.layers.decoder import Decoder
from ingot.layers.linear import Linear, linears, narrower
from ingot.models.model_registry import architecture_named
from ingot.quant.schemes.cpu_forms import PACKED, cpu_form_bytes, has_cpu_form
from ingot.quant.schemes.linear_scheme import LinearScheme

CPU_PROCESS_BYTES = 400_000_000  # of one without: 350 MB are resident once a tiny model has answered
WEIGHT_KINDS = ("embedding", "attention", "mlp", "norms", "head")


@dataclass(frozen=True)
class OnCpu:
    """How a CPU holds weights (layers/cpu_weights.py): in which dtypes the engine's file has them, and
    whether linear layers are packed.
    """

    stored: HalfDtypes
    packs: bool


def weight_bytes(
    config: DecoderConfig,
    quant: QuantConfig,
    dtype: torch.dtype | HalfDtypes,
    on_cpu: OnCpu | None = None,
) -> dict[str, int]:
    """Bytes of the loaded weights by kind (``WEIGHT_KINDS``, and the encoder's), in ``dtype`` or in one for
    each half; a linear layer stores its scheme's layout. A tied head has none, unless a CPU holds it in
    another form than the embedding. A weight that is packed in one of two forms counts as the larger one.
    """
    return dict(_contents(config, quant, dtype, on_cpu).weights)


class _Product(NamedTuple):
    """A linear layer's shape and how it is stored; ``head``: it has the rows of logits alone."""

    out_features: int
    in_features: int
    scheme: LinearScheme
    head: bool


class _Contents(NamedTuple):
    """Bytes by kind, and the quantized linear layers, one of each shape and scheme."""

    weights: Mapping[str, int]
    narrow: tuple[_Product, ...]


def _contents(
    config: DecoderConfig, quant: QuantConfig, dtype: torch.dtype | HalfDtypes, on_cpu: OnCpu | None = None
) -> _Contents:
    dtypes = dtype if isinstance(dtype, HalfDtypes) else HalfDtypes.of(dtype_name(dtype))
    return _counted(config, quant, tuple(quant.layers), dtypes, on_cpu)


@lru_cache(maxsize=64)
def _counted(
    config: DecoderConfig,
    quant: QuantConfig,
    _order: tuple[str, ...],
    dtypes: HalfDtypes,
    on_cpu: OnCpu | None,
) -> _Contents:
    """``_contents``, cached: a search asks for a few formats a thousand times. ``_order`` tells apart
    patterns that are equal as a dict but come in another order: the last that matches counts.
    """
    build = BuildConfig.of(dtypes, 1, 1)
    model = architecture_named(config.architecture).empty_model(config, build, quant)
    weights = dict.fromkeys(WEIGHT_KINDS if config.encoder is None else (*WEIGHT_KINDS, "encoder"), 0)
    places = (("embed_", "embedding"), ("lm_head.", "head"), ("encoder.", "encoder"))
    for name, tensor in model.named_parameters():
        kind = next((kind for start, kind in places if name.startswith(start)), "norms")
        if kind == "norms" and "_attn." in name:
            kind = "attention"
        elif kind == "norms" and ".mlp." in name:
            kind = "mlp"
        weights[kind] += tensor.nbytes if on_cpu is None else _held_bytes(model, name, tensor, dtypes, on_cpu)
    if model.tied and on_cpu is not None:
        compute = parse_dtype(dtypes.decoder)
        if narrower(parse_dtype(on_cpu.stored.decoder), compute) != compute:  # the embedding is narrow
            weights["head"] += _held_bytes(model, f"{HEAD}.weight", model.embed_tokens.weight, dtypes, on_cpu)
    products = (
        _Product(m.out_features, m.in_features, m.scheme, name == HEAD) for name, m in linears(model).items()
    )
    return _Contents(weights, tuple(dict.fromkeys(p for p in products if not p.scheme.dense)))


def _held_bytes(model: Decoder, name: str, tensor: torch.Tensor, dtypes: HalfDtypes, on_cpu: OnCpu) -> int:
    """Bytes of a tensor that a CPU holds, with what its packing adds."""
    path, _, leaf = name.rpartition(".")
    module, compute = model.get_submodule(path), parse_dtype(dtypes.at(name))
    stored = narrower(parse_dtype(on_cpu.stored.at(name)), compute)
    if module is model.embed_tokens:
        return tensor.numel() * stored.itemsize
    if not on_cpu.packs or not isinstance(module, Linear) or leaf not in PACKED:
        return tensor.nbytes
    if not has_cpu_form(module.scheme, stored, compute, module.in_features):
        return tensor.nbytes
    return cpu_form_bytes(module.scheme, module.out_features, module.in_features, stored)


def largest_weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of the largest single weight before packing: embedding, joined gate and up, or joined q, k, v."""
    qkv = config.q_size + 2 * config.kv_size
    inner = (2 if config.gated else 1) * config.intermediate_size
    return max(config.vocab_size, qkv, inner) * config.hidden_size * dtype.itemsize


def cache_dtype(dtype: torch.dtype, kv_dtype: str) -> torch.dtype:
    """The KV cache's dtype for arithmetic in ``dtype``; ``auto``, with no engine known, is that."""
    return NARROW_CACHES.get(kv_dtype, dtype)


def kv_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers: 2 · layers · kv_size · bytes per value, and in 8
    bits 4 bytes per head for its scale.
    """
    scale = SCALE_BYTES if dtype in NARROW_CACHES.values() else 0
    head = config.head_dim * dtype.itemsize + scale
    return 2 * config.num_layers * config.num_kv_heads * head


def activation_bytes(
    config: DecoderConfig,
    dtype: torch.dtype,
    runtime: RuntimeConfig,
    max_batch_size: int,
    *,
    kernels: bool = True,
    quant: QuantConfig | None = None,
) -> int:
    """Most bytes that the largest step has allocated at once, its inputs and the KV cache apart.

    With T tokens and L rows of logits, H hidden_size, Q and K the widths of queries and of keys, I
    intermediate_size, V vocab_size and e bytes per value the peak is the largest of

        attention   T e (2 H + 2 Q + 2 K)      2 H: the layer's input and its norm
        output      T e (5 H + Q)              with the sum and its norm
        MLP         T e (4 H + 3 I)            3 I is 2 I for a plain MLP
        down        T e (7 H + I)
        logits      (T + L) H e, L (H + V) e, L V (e + 4) where e is 2

    ``kernels``: the steps of a GPU. False: of the PyTorch references on a CPU in fp32, which hold temporaries
    too: one more H in a norm, one more I in a gated MLP, the rotated halves of queries and keys, a copy of
    the request's keys and values, scores where they have a softcap, and masks where there is a window.

    On top of the layers and of the head comes the largest workspace of their quantized products (``quant``):
    a widened weight, on a CPU a piece of it with its temporaries; or an input in 8 bits with its scales, and
    a weight of 4 bits as int8. The head has L rows, so few that it is multiplied as it is stored.
    """
    tokens = most_tokens(runtime.step_budget, max_batch_size)
    rows = most_logits(runtime.step_budget, max_batch_size)
    h, q, k, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    elements: list[float] = [  # per token
        2 * h + 2 * q + 2 * k,
        5 * h + q,
        4 * h + inner * (3 if config.gated else 2),
        7 * h + inner,
    ]
    if not kernels:
        padding = -(-tokens // runtime.block_size) * runtime.block_size / tokens
        elements += _reference_elements(config, padding)
        if config.attention_softcap:  # scores, and masks of one byte
            capped = min(capped_rows(config.num_heads, tokens), tokens)
            scores = config.num_heads * capped + (tokens + capped) / 4
            elements.append(2 * h + 3 * q + 4 * k * padding + scores)
        elif config.sliding_window:  # two masks of one byte, and both in one
            elements.append(2 * h + 2 * q + 2 * k * padding + 3 * tokens / 4)
        if runtime.kv_dtype in NARROW_CACHES:  # widened keys and values
            elements.append(2 * h + 2 * q + 4 * k)
    size, wanted, logits = dtype.itemsize, rows * h, rows * config.vocab_size
    own = {True: 0, False: 0}  # the largest workspace of the head and of other products
    encoded = 0 if config.encoder is None else config.encoder.max_positions
    # Speech has a probe beside each request's own row, and decodes may be more than a chunk's logits.
    probed = max(rows, max_batch_size * (2 if config.crosses else 1))
    for out_features, in_features, stored, head in _narrow(config, quant, dtype):
        scheme = stored.batch_invariant() if runtime.batch_invariant else stored
        most_rows = probed if head else max(tokens, encoded)
        found = scheme.workspace_bytes(out_features, in_features, most_rows, dtype, kernels=kernels)
        own[head] = max(own[head], found)
    return max(
        int(max(elements) * tokens * size) + own[False],
        (tokens * h + wanted) * size,
        (wanted + logits) * size + own[True],
        0 if size == 4 else logits * (size + 4),
    )


def _narrow(config: DecoderConfig, quant: QuantConfig | None, dtype: torch.dtype) -> tuple[_Product, ...]:
    """The quantized linear layers, one of each shape and scheme."""
    return () if quant is None or quant.dense else _contents(config, quant, dtype).narrow


def _reference_elements(config: DecoderConfig, padding: float) -> Iterator[float]:
    """Values per token where the references hold more; ``padding``: cache tokens in blocks over tokens."""
    h, q, k, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    if config.norm == "rms_norm":
        yield 6 * h + q
        yield 8 * h + inner
    if config.gated:
        yield 4 * h + 4 * inner
    rotated = config.rope.dim + max(2 * q, q + 2 * k) if config.rope is not None else 0
    yield 2 * h + q + 2 * k + rotated + (q + k if config.qk_norm else 0)
    yield 2 * h + 2 * q + max(3 * k * padding, 2 * k * padding + q)


def encoder_blocks(config: DecoderConfig, runtime: RuntimeConfig, max_batch_size: int) -> int:
    """Blocks of the encoder cache: as asked for, else as ``RuntimeConfig.encoder_positions`` says."""
    if config.encoder is None:
        return 0
    one = -(-config.encoder.max_positions // runtime.block_size)
    if runtime.encoder_positions is not None:
        return -(-runtime.encoder_positions // runtime.block_size)
    if config.crosses:
        return one * max_batch_size
    return max(one, -(-2 * runtime.encoder_budget // runtime.block_size))


def encoded_position_bytes(config: DecoderConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """Bytes of a position in the encoder cache: an embedding in ``dtype``, or all layers' keys and values."""
    if config.splices:
        return config.hidden_size * dtype.itemsize
    return kv_bytes_per_token(config, kv_dtype)


def encoded_at_once(config: EncoderConfig, runtime: RuntimeConfig, *, on_gpu: bool) -> int:
    """Longest inputs that are encoded together: as many as a step's budget has, up to ENCODED_AT_ONCE. One on
    a CPU, which is busy with it, and where a result must not depend on its neighbours.
    """
    if not on_gpu or runtime.batch_invariant:
        return 1
    return min(max(runtime.encoder_budget // config.max_positions, 1), ENCODED_AT_ONCE)


def encoding_bytes(
    config: DecoderConfig, dtypes: HalfDtypes, runtime: RuntimeConfig, max_batch_size: int, *, on_gpu: bool
) -> int:
    """Bytes for encoding the longest inputs that are encoded together, and for its CUDA graphs; in wiring
    ``prefix`` also for the rows that a step splices.
    """
    if config.encoder is None:
        return 0
    inputs = encoded_at_once(config.encoder, runtime, on_gpu=on_gpu)
    if on_gpu and runtime.cuda_graphs:
        inputs *= 2
    positions, rows = inputs * config.encoder.max_positions, 0
    if config.splices:
        rows = 2 * most_tokens(runtime.step_budget, max_batch_size) * config.hidden_size
    if dtypes.other is not None:  # outputs in the decoder's dtype, too
        rows += positions * config.encoder.hidden_size
    encoder, decoder = parse_dtype(dtypes.encoder), parse_dtype(dtypes.decoder)
    return positions * config.encoder.activation_values * encoder.itemsize + rows * decoder.itemsize
