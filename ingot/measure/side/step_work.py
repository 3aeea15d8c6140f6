"""The least bytes and operations of a step, for MBU and MFU.

work.decode_bytes(batch=8, context=576) / seconds / ceiling_bytes_per_second      # MBU
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from ingot.config.decoder_config import DecoderConfig
from ingot.layers.decoder import Decoder
from ingot.layers.linear import linears
from ingot.memory.memory_sizes import kv_bytes_per_token


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one model.

    Attributes:
        weight_bytes: read by every step: all weights but the embedding tables, of which a step reads rows.
        kv_bytes: of one token in the cache, all layers together.
        linear_flops: of one token in all linear layers of the stack, 2 per element of their weights.
        head_flops: of one row of logits.
        pair_flops: of one query with one key in all layers, 4 per element of the query heads.
        window: tokens that a query sees at most in layers with a window; 0: all.
        windowed: the share of layers with a window.
    """

    weight_bytes: int
    kv_bytes: int
    linear_flops: int
    head_flops: int
    pair_flops: int
    window: int = 0
    windowed: float = 1.0

    @classmethod
    def of(cls, config: DecoderConfig, weight_bytes: int, kv_dtype: torch.dtype) -> Self:
        return cls(
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes_per_token(config, kv_dtype),
            linear_flops=2 * config.num_layers * layer_weights(config),
            head_flops=2 * config.hidden_size * config.vocab_size,
            pair_flops=4 * config.num_layers * config.q_size,
            window=config.sliding_window,
            windowed=1 - len(config.full_layers) / config.num_layers,
        )

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes that a decode step of ``batch`` requests reads, each seeing ``context`` tokens."""
        return self.weight_bytes + batch * self._seen(context) * self.kv_bytes

    def decode_flops(self, batch: int, context: float) -> float:
        """Operations of the same step."""
        return batch * (self.linear_flops + self.head_flops + self._seen(context) * self.pair_flops)

    def prefill_flops(self, batch: int, tokens: int) -> float:
        """Operations from ``batch`` prompts of ``tokens`` tokens to their first logits."""
        near, all_ = causal_pairs(tokens, self.window), causal_pairs(tokens)
        pairs = all_ + self.windowed * (near - all_)
        return batch * (tokens * self.linear_flops + self.head_flops + pairs * self.pair_flops)

    def _seen(self, context: float) -> float:
        """Tokens that a query sees, on average over layers."""
        near = min(context, self.window) if self.window else context
        return context + self.windowed * (near - context)


def layer_weights(config: DecoderConfig) -> int:
    """Weights of the linear layers of one decoder layer."""
    attention = 2 * (config.q_size + config.kv_size)
    mlp = (3 if config.gated else 2) * config.intermediate_size
    return config.hidden_size * (attention + mlp)


def causal_pairs(tokens: int, window: int = 0) -> int:
    """Pairs of a query and a key that it sees, for ``tokens`` queries over themselves."""
    if window and tokens > window:
        return window * (window + 1) // 2 + (tokens - window) * window
    return tokens * (tokens + 1) // 2


def read_bytes(model: Decoder) -> int:
    """Bytes of weights that every step of an Ingot model reads."""
    return weight_bytes(model, [model.embed_tokens, model.embed_positions], model.lm_head)


def weight_bytes(model: nn.Module, tables: list[nn.Module | None], head: nn.Module) -> int:
    """Bytes of all parameters but those of embedding ``tables``, except a table that is also the ``head``."""
    whole = {id(p) for p in head.parameters()}
    rows = {id(p) for table in tables if table is not None for p in table.parameters()} - whole
    packed = sum(linear.packed_bytes for linear in linears(model).values())
    return packed + sum(p.nbytes for p in model.parameters() if id(p) not in rows)
