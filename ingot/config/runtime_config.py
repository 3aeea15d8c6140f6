"""How an engine runs on one machine.

Covers the values that change speed and memory; output they change within rounding at most.

    RuntimeConfig(memory_fraction=0.8)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from ingot.config.build_config import BUILT_KV_DTYPES
from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError

_MOST_BLOCK = 4096
KV_DTYPES = ("auto", *BUILT_KV_DTYPES)


@dataclass(frozen=True)
class RuntimeConfig(JsonConfig):
    """Sizes of the paged KV cache and of a step.

    Attributes:
        memory_fraction: share of a GPU's memory that weights, activations and cache may take together; on a
            CPU, of the memory that is available when the engine is loaded.
        block_size: tokens in a cache block.
        token_budget: tokens that one step computes at most; longer prompts are prefilled in chunks. Where a
            sixteenth more ends the last prompt, the step takes it.
        prompt_chunk: tokens of one prompt that a step computes at most while other requests decode, so that
            a long prompt costs their steps little; None: what the budget leaves.
        long_prompt: ``prompt_chunk`` cuts only prompts with more tokens to compute than this.
        prompt_share: share of a decode step's time that such a prompt may take in addition, except for its
            first ``prompt_chunk`` tokens: chunks of it are computed a few layers per step. Not of models
            that hear. None: ``prompt_chunk`` tokens through all layers in every step.
        cache_tokens: size of the KV cache in tokens; None holds a full batch of longest requests, on a GPU
            as far as ``memory_fraction`` goes, on a CPU up to 256 MiB or one longest request.
        prefix_reuse: share the blocks of equal prompt beginnings.
        cuda_graphs: replay decode steps, and steps of short prompts, as CUDA graphs.
        fused_decode: on a GPU let small decode steps use kernels with norm, rotary, activation, bias and
            residual folded into the products, and all steps products that add the residual; equal to the
            others within the dtype's rounding. In fp32 of dense weights alone, and a decode step of one token
            uses them. Off while ``batch_invariant``.
        run_ahead: on a GPU, send each step before the tokens of the last one are read, so that the host's
            work is hidden; a request that ends computes one token more than it gives.
        batch_invariant: compute a request's logits to the same bits whatever runs beside it, in whatever
            chunks, after a preemption, or on cached beginnings; slower (docs/numerics.md has the figures).
        kv_dtype: numbers of the KV cache: ``model``, the dtype of arithmetic; ``int8`` or ``fp8``
            (e4m3), with a scale for each token's head of keys and of values (docs/quantization.md has what
            they cost); ``auto``, as the
            engine was built.
        encoder_budget: positions that one step encodes at most, on a GPU inputs of one shape together; a
            longer input takes a step's budget alone.
        encoder_positions: size of the encoder cache in positions; None holds what a full batch of longest
            inputs needs (kind ``cross``), or twice the budget (``prefix``), and at least one input.
    """

    memory_fraction: float = 0.9
    block_size: int = 64
    token_budget: int = 2048
    prompt_chunk: int | None = None
    long_prompt: int = 0
    prompt_share: float | None = None
    cache_tokens: int | None = None
    prefix_reuse: bool = True
    cuda_graphs: bool = True
    fused_decode: bool = True
    run_ahead: bool = True
    batch_invariant: bool = False
    kv_dtype: Literal["auto", "model", "int8", "fp8"] = "auto"
    encoder_budget: int = 12288
    encoder_positions: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError("memory_fraction is out of range", seen=self.memory_fraction, allowed="(0, 1]")
        if not 1 <= self.block_size <= _MOST_BLOCK or self.block_size & (self.block_size - 1):
            allowed = f"1 to {_MOST_BLOCK}"
            raise ConfigError("block_size must be a power of two", seen=self.block_size, allowed=allowed)
        if self.token_budget < 1:
            raise ConfigError("token_budget must be >= 1", seen=self.token_budget)
        if self.prompt_chunk is not None and self.prompt_chunk < 1:
            raise ConfigError("prompt_chunk must be >= 1", seen=self.prompt_chunk, field="prompt_chunk")
        if self.long_prompt < 0:
            raise ConfigError("long_prompt must not be negative", seen=self.long_prompt)
        if self.prompt_share is not None:
            if not 0.0 < self.prompt_share <= 1.0:
                what = "prompt_share is out of range"
                raise ConfigError(what, seen=self.prompt_share, allowed="(0, 1]", field="prompt_share")
            if self.prompt_chunk is None:
                raise ConfigError("prompt_share needs prompt_chunk", field="prompt_chunk")
        if self.cache_tokens is not None and self.cache_tokens < 1:
            raise ConfigError("cache_tokens must be >= 1", seen=self.cache_tokens)
        if self.encoder_budget < 1:
            raise ConfigError("encoder_budget must be >= 1", seen=self.encoder_budget)
        if self.encoder_positions is not None and self.encoder_positions < 1:
            raise ConfigError("encoder_positions must be >= 1", seen=self.encoder_positions)
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(
                "unknown kv_dtype", seen=self.kv_dtype, allowed=", ".join(KV_DTYPES), field="kv_dtype"
            )

    def of_engine(self, kv_dtype: Literal["model", "int8", "fp8"]) -> Self:
        """What an engine runs with that was built for a cache in ``kv_dtype``: no ``auto`` is left."""
        return self if self.kv_dtype != "auto" else self.replace(kv_dtype=kv_dtype)
