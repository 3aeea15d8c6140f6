"""How many bytes each part of an engine takes, by formula.

Covers the formulas: weights by kind, KV cache, rotary tables, the largest step's activations; what steps keep
is step_memory.py's.

    weight_bytes(config, QuantConfig(), torch.float16)["mlp"]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.config.json_config import JsonConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import (
    ENCODED_AT_ONCE,
    most_logits,
    most_tokens,
)
from ingot.config.units import size_text
from ingot.device import dtype_name
from ingot.kernels.attention.score_exponents import capped_rows
from ingot.kernels.cache.cache_scales import NARROW_CACHES, SCALE_BYTES
from ingot.layers.linear import linears
from ingot.layers.rotary import RotaryTable
from ingot.models.empty_model import empty_model, stored_tensors
from ingot.models.model_registry import architecture_named
from ingot.quant.schemes.linear_scheme import LinearScheme

PROCESS_BYTES = 800_000_000  # of a Python process with PyTorch and its CUDA libraries
CPU_PROCESS_BYTES = 400_000_000  # of one without: 350 MB are resident once a tiny model has answered
_SHARD_BYTES = 5_000_000_000  # of a checkpoint, at most
_SMALL_FILES_BYTES = 16 << 20  # tokenizer, manifest, plan
WEIGHT_KINDS = ("embedding", "attention", "mlp", "norms", "head")


def weight_bytes(config: DecoderConfig, quant: QuantConfig, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the loaded weights by kind (``WEIGHT_KINDS``, and the encoder's), in ``dtype``; what a linear
    layer stores is the scheme's own layout. A tied head has none: it is the embedding.
    """
    return dict(_contents(config, quant, dtype).weights)


class _Product(NamedTuple):
    """A linear layer's shape and how it is stored."""

    out_features: int
    in_features: int
    scheme: LinearScheme


@dataclass(frozen=True)
class _Contents:
    """What a model's modules tell of its bytes.

    Attributes:
        weights: bytes by kind.
        narrow: the linear layers of fewer bits, one of each shape and scheme.
    """

    weights: Mapping[str, int]
    narrow: tuple[_Product, ...]


def _contents(config: DecoderConfig, quant: QuantConfig, dtype: torch.dtype) -> _Contents:
    """Of a model in one number format; the modules are made once a format."""
    return _counted(config, quant, tuple(quant.layers), dtype)


@lru_cache(maxsize=64)
def _counted(
    config: DecoderConfig, quant: QuantConfig, _order: tuple[str, ...], dtype: torch.dtype
) -> _Contents:
    """``_contents``, kept: a search asks for a few formats a thousand times. ``_order`` tells apart patterns
    that are equal as a dict but come in another order, of which the last that matches counts.
    """
    build = BuildConfig(dtype_name(dtype), 1, 1)  # type: ignore[arg-type]
    model = empty_model(architecture_named(config.architecture), config, build, quant, KernelPlan())
    weights = dict.fromkeys(WEIGHT_KINDS if config.encoder is None else (*WEIGHT_KINDS, "encoder"), 0)
    for name, tensor in stored_tensors(model).items():
        weights[_kind_of(name)] += tensor.numel() * tensor.element_size()
    products = (_Product(m.out_features, m.in_features, m.scheme) for m in linears(model).values())
    return _Contents(weights, tuple(dict.fromkeys(p for p in products if not p.scheme.dense)))


def largest_weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of the largest single weight before packing: embedding, joined gate and up, or joined q, k, v."""
    qkv = config.q_size + 2 * config.kv_size
    inner = (2 if config.gated else 1) * config.intermediate_size
    return max(config.vocab_size, qkv, inner) * config.hidden_size * dtype.itemsize


def cache_dtype(dtype: torch.dtype, kv_dtype: str) -> torch.dtype:
    """What the KV cache holds where arithmetic is in ``dtype``; ``auto``, with no engine known, is that."""
    return NARROW_CACHES.get(kv_dtype, dtype)


def kv_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers: 2 · layers · kv_size · bytes per value, and of 8
    bits 4 bytes a head for its scale.
    """
    scale = SCALE_BYTES if dtype in NARROW_CACHES.values() else 0
    head = config.head_dim * dtype.itemsize + scale
    return 2 * config.num_layers * config.num_kv_heads * head


def rotary_bytes(config: DecoderConfig, max_seq_len: int) -> int:
    """Bytes of the rotary table, float32; 0 for learned positions."""
    return RotaryTable.table_bytes(config.rope, max_seq_len) if config.rope is not None else 0


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
    intermediate_size, V vocab_size and e bytes a value the peak is the largest of

        attention   T e (2 H + 2 Q + 2 K)      2 H: the layer's input and its norm
        output      T e (5 H + Q)              with the sum and its norm
        MLP         T e (4 H + 3 I)            3 I is 2 I for a plain MLP
        down        T e (7 H + I)
        logits      (T + L) H e, L (H + V) e, L V (e + 4) where e is 2

    ``kernels``: the steps of a GPU. False: of the PyTorch references on a CPU in fp32, which hold temporaries
    too: one more H in a norm, one more I in a gated MLP, the rotated halves of queries and keys, and a copy
    of the request's keys and values; scores where they have a softcap.

    A weight of fewer bits (``quant``) is widened for the step, one at a time: the largest counts on top, on a
    CPU a piece of it with its temporaries. Where activations are rounded to 8 bits, the largest input's
    values and scales count on top instead, on a CPU with a product's temporaries; of a weight of 4 bits with
    the weight as int8, whole on a CPU, too.
    """
    tokens = most_tokens(runtime.token_budget, max_batch_size)
    rows = most_logits(runtime.token_budget, max_batch_size)
    layer: float = max(_layer_elements(config))
    if not kernels:
        padding = -(-tokens // runtime.block_size) * runtime.block_size / tokens
        layer = max(
            layer,
            *_reference_elements(config, padding),
            _capped_elements(config, tokens, padding),
            *([_widened_cache_elements(config)] if runtime.kv_dtype in NARROW_CACHES else []),
        )
    most = max(int(layer * tokens * dtype.itemsize), _head_bytes(config, dtype, tokens, rows))
    return most + _narrow_bytes(config, quant or QuantConfig(), dtype, tokens, kernels)


def _narrow_bytes(
    config: DecoderConfig, quant: QuantConfig, dtype: torch.dtype, tokens: int, kernels: bool
) -> int:
    """Bytes of what a step's quantized products hold at most: a widened weight, or an input in 8 bits."""
    if quant.dense:
        return 0
    sizes = (
        one.scheme.workspace_bytes(one.out_features, one.in_features, tokens, dtype, kernels=kernels)
        for one in _contents(config, quant, dtype).narrow
    )
    return max(sizes, default=0)


def _layer_elements(config: DecoderConfig) -> Iterator[int]:
    """Values a token in each phase of a layer."""
    h, q, k, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    yield 2 * h + 2 * q + 2 * k
    yield 5 * h + q
    yield 4 * h + inner * (3 if config.gated else 2)
    yield 7 * h + inner


def _reference_elements(config: DecoderConfig, padding: float) -> Iterator[float]:
    """``_layer_elements`` where the references hold more; ``padding``: cache tokens in blocks over tokens."""
    h, q, k, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    if config.norm == "rms_norm":
        yield 6 * h + q
        yield 8 * h + inner
    if config.gated:
        yield 4 * h + 4 * inner
    rotated = config.rope.dim + max(2 * q, q + 2 * k) if config.rope is not None else 0
    yield 2 * h + q + 2 * k + rotated + (q + k if config.qk_norm else 0)
    yield 2 * h + 2 * q + max(3 * k * padding, 2 * k * padding + q)


def _capped_elements(config: DecoderConfig, tokens: int, padding: float) -> float:
    """``_layer_elements`` of a reference's attention with a softcap, which has scores and masks of one byte;
    0 without one.
    """
    if not config.attention_softcap:
        return 0
    rows = min(capped_rows(config.num_heads, tokens), tokens)
    masks = (tokens + rows) / 4
    keys = 4 * config.kv_size * padding
    return 2 * config.hidden_size + 3 * config.q_size + keys + config.num_heads * rows + masks


def _widened_cache_elements(config: DecoderConfig) -> int:
    """``_layer_elements`` where a reference makes keys and values of a cache in 8 bits wide."""
    return 2 * config.hidden_size + 2 * config.q_size + 4 * config.kv_size


def _head_bytes(config: DecoderConfig, dtype: torch.dtype, tokens: int, rows: int) -> int:
    size, logits, wanted = dtype.itemsize, rows * config.vocab_size, rows * config.hidden_size
    widened = 0 if size == 4 else logits * (size + 4)
    return max((tokens * config.hidden_size + wanted) * size, (wanted + logits) * size, widened)


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
    """Bytes of a position in the encoder cache: an embedding in ``dtype``, or keys and values in all layers,
    which a KV cache in 8 bits has in 8 bits, too.
    """
    if config.splices:
        return config.hidden_size * dtype.itemsize
    return kv_bytes_per_token(config, kv_dtype)


def encoded_at_once(config: EncoderConfig, runtime: RuntimeConfig, *, on_gpu: bool) -> int:
    """Longest inputs that are encoded together: as many as a step's budget has, up to ENCODED_AT_ONCE. One on
    a CPU, which has enough to do with it, and where a result must not depend on its neighbours.
    """
    if not on_gpu or runtime.batch_invariant:
        return 1
    return min(max(runtime.encoder_budget // config.max_positions, 1), ENCODED_AT_ONCE)


def encoding_bytes(
    config: DecoderConfig, dtype: torch.dtype, runtime: RuntimeConfig, max_batch_size: int, *, on_gpu: bool
) -> int:
    """Bytes that the longest inputs which are encoded together take meanwhile, and CUDA graphs of that; in
    wiring ``prefix`` also of the rows that a step splices.
    """
    if config.encoder is None:
        return 0
    inputs = encoded_at_once(config.encoder, runtime, on_gpu=on_gpu)
    if on_gpu and runtime.cuda_graphs:
        inputs *= 2
    values = inputs * config.encoder.max_positions * config.encoder.activation_values
    if config.splices:
        values += 2 * most_tokens(runtime.token_budget, max_batch_size) * config.hidden_size
    return values * dtype.itemsize


def _kind_of(name: str) -> str:
    if name.startswith("embed_"):
        return "embedding"
    if name.startswith("lm_head."):
        return "head"
    if name.startswith("encoder."):
        return "encoder"
    if "_attn." in name:
        return "attention"
    return "mlp" if ".mlp." in name else "norms"


@dataclass(frozen=True)
class HostBytes(JsonConfig):
    """What the host and its disk hold while an engine is built and while it is loaded.

    Attributes:
        build_memory, load_memory: bytes that must be free: the process and what it copies.
        build_mapped, load_mapped: bytes of files that are mapped beside that; the system takes them back when
            it needs them.
        build_disk: of the engine's folder; an engine that it replaces stays until the end.
    """

    build_memory: int
    build_mapped: int
    build_disk: int
    load_memory: int
    load_mapped: int

    def rows(self) -> Iterator[tuple[str, int, str]]:
        """(what, bytes, remark), for people."""
        yield (
            "memory while building",
            self.build_memory,
            f"and {size_text(self.build_mapped)} of mapped files",
        )
        yield "disk for the engine", self.build_disk, "next to the engine it replaces, if any"
        yield "memory while loading", self.load_memory, f"and {size_text(self.load_mapped)} of mapped files"


def host_bytes(
    config: DecoderConfig, quant: QuantConfig, stored: torch.dtype, loaded: torch.dtype, *, on_gpu: bool
) -> HostBytes:
    """Of a build that stores weights in ``stored`` and a load that computes in ``loaded``.

    A build maps one shard, which Hugging Face cuts at 5 GB, and holds the largest weight as it was read,
    joined and cast. A load maps the engine's file and holds one weight; on a CPU all of them stay.
    """
    disk = sum(weight_bytes(config, quant, stored).values()) + _SMALL_FILES_BYTES
    largest = largest_weight_bytes(config, stored)
    stay = 0 if on_gpu else sum(weight_bytes(config, quant, loaded).values())
    process = PROCESS_BYTES if on_gpu else CPU_PROCESS_BYTES
    return HostBytes(
        build_memory=process + 2 * largest,
        build_mapped=min(disk, _SHARD_BYTES),
        build_disk=disk,
        load_memory=process + stay + largest_weight_bytes(config, loaded),
        load_mapped=disk,
    )
