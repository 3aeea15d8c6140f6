"""How an engine runs on one machine: speed and memory; output changes within rounding at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from ingot.config.build_config import BUILT_KV_DTYPES
from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError

_MOST_BLOCK = 4096
KV_DTYPES = ("auto", *BUILT_KV_DTYPES)
EMBEDDINGS = ("device", "host")


@dataclass(frozen=True)
class RuntimeConfig(JsonConfig):
    """Sizes of the paged KV cache and of a step.

    Attributes:
        memory_fraction: share of a GPU's memory for weights, activations and cache; on a CPU, of the memory
            that is available when the engine is loaded.
        block_size: tokens in a cache block.
        token_budget: most tokens of a step; longer prompts are prefilled in chunks. A step may exceed it by a
            sixteenth to end the last prompt.
        prompt_budget: most tokens of a step where so many of prompts wait and, with a ``prompt_chunk``, no
            request decodes: such steps are cheaper per token, and the tokens that wait for one last longer.
            None: on a GPU ``WIDE_STEP`` times the ``token_budget`` where memory allows, else that.
        prompt_chunk: most tokens of one prompt in a step while other requests decode, so that a long prompt
            slows them little; None: what the budget leaves.
        long_prompt: ``prompt_chunk`` cuts only prompts with more tokens to compute than this.
        prompt_share: share of a decode step's time that such a prompt may take in addition, except for its
            first ``prompt_chunk`` tokens: its chunks are computed a few layers per step. Not for speech
            models. None: ``prompt_chunk`` tokens through all layers in every step.
        cache_tokens: size of the KV cache in tokens; None: a full batch of longest requests, limited on a GPU
            by ``memory_fraction``, on a CPU to 256 MiB or one longest request.
        prefix_reuse: share the blocks of equal prompt prefixes.
        cuda_graphs: replay decode steps, and steps of short prompts, as CUDA graphs.
        fused_decode: on a GPU, small decode steps use kernels with norm, rotary, activation, bias and
            residual fused into the products, and all steps products that add the residual; equal to the
            others within the dtype's rounding. In fp32 only with dense weights and for decode steps of one
            token. Off with ``batch_invariant``.
        run_ahead: on a GPU, launch each step before the tokens of the last one are read, which hides the
            host's work; a request that ends computes one token more than it returns.
        batch_invariant: compute a request's logits to the same bits whatever runs in the same batch, in any
            chunks, after a preemption, or on cached prefixes; slower (docs/numerics.md).
        kv_dtype: dtype of the KV cache: ``model``, the dtype of arithmetic; ``int8`` or ``fp8`` (e4m3), with
            one scale per token and head of keys and of values (docs/quantization.md); ``auto``, as built.
        embedding: where the token embedding is kept: ``device``, or ``host``: in pinned memory, from which a
            GPU reads the rows of a step's tokens, so that it has room for more; answers stay the same to the
            bit. Not where the head is the embedding. A CPU has it in its memory anyway.
        encoder_budget: most positions that one step encodes, on a GPU inputs of one shape at once; a longer
            input takes a step's budget alone.
        encoder_positions: size of the encoder cache in positions; None: what a full batch of longest inputs
            needs (wiring ``cross``), or twice the budget (``prefix``), and at least one input.
    """

    memory_fraction: float = 0.9
    block_size: int = 64
    token_budget: int = 2048
    prompt_budget: int | None = None
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
    embedding: Literal["device", "host"] = "device"
    encoder_budget: int = 12288
    encoder_positions: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError("memory_fraction is out of range", seen=self.memory_fraction, allowed="(0, 1]")
        if not 1 <= self.block_size <= _MOST_BLOCK or self.block_size & (self.block_size - 1):
            allowed = f"1 to {_MOST_BLOCK}"
            raise ConfigError("block_size must be a power of two", seen=self.block_size, allowed=allowed)
        for name in ("token_budget", "prompt_budget", "cache_tokens", "encoder_budget", "encoder_positions"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1", seen=getattr(self, name))
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
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(
                "unknown kv_dtype", seen=self.kv_dtype, allowed=", ".join(KV_DTYPES), field="kv_dtype"
            )
        if self.embedding not in EMBEDDINGS:
            what, allowed = "unknown place of the embedding", ", ".join(EMBEDDINGS)
            raise ConfigError(what, seen=self.embedding, allowed=allowed, field="embedding")

    @property
    def step_budget(self) -> int:
        """Tokens of the largest step, except for those that end a prompt."""
        return max(self.token_budget, self.prompt_budget or 0)

    def of_engine(self, kv_dtype: Literal["model", "int8", "fp8"]) -> Self:
        """The config with ``auto`` replaced by the ``kv_dtype`` that an engine was built for."""
        return self if self.kv_dtype != "auto" else self.replace(kv_dtype=kv_dtype)
