"""The shape of a decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ingot.config.encoder_config import EncoderConfig, Wiring
from ingot.config.json_config import JsonConfig
from ingot.config.modality import TEXT, Modality, modality_named
from ingot.errors import ConfigError

# No known model comes near these; a file that says more is damaged, and would cost loops or memory.
_MOST = {
    "num_layers": 1 << 10,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_positions": 1 << 31,
}
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
RopeScaling = Literal["none", "linear", "llama3", "yarn", "qwen_ntk"]


@dataclass(frozen=True)
class RopeConfig(JsonConfig):
    """Rotary position embedding over the first ``dim`` channels of a head, half-split (NeoX) order.

    ``scaling``: ``linear`` divides positions by ``factor``; ``llama3`` and ``yarn`` change the frequencies;
    ``qwen_ntk`` grows the base per request once a prompt exceeds ``original_max``.
    """

    dim: int
    theta: float = 10000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ConfigError("rotary dimension must be even and positive", seen=self.dim)
        if self.scaling in ("llama3", "yarn", "qwen_ntk") and self.original_max <= 0:
            raise ConfigError(f"rope scaling {self.scaling} needs original_max", seen=self.original_max)
        if not 1 < self.theta < math.inf:
            raise ConfigError("the rotary base is out of range", seen=self.theta, allowed="a number above 1")
        for name in ("factor", "attention_factor", "low_freq_factor", "beta_slow"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} of rope scaling must be positive", seen=getattr(self, name))
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not getattr(self, low) < getattr(self, high) < math.inf:
                seen = (getattr(self, high), getattr(self, low))
                raise ConfigError(f"{high} of rope scaling must be above {low}", seen=seen)


@dataclass(frozen=True)
class DecoderConfig(JsonConfig):
    """A decoder, alone or after an encoder.

    ``wiring`` says how the ``encoder``'s outputs reach the decoder: ``prefix`` splices them into the
    prompt's embeddings, with ``cross`` every layer attends to them, ``none`` has no encoder.
    ``architecture`` is the registry name (``llama``, ``qwen`` …). ``rope`` is None for learned positions.
    ``logn_length`` > 0 scales queries at 0-based position p by max(1, log(p+1)/log(logn_length)) (Qwen v1).
    ``sliding_window`` > 0 lets a token see only that many last tokens, itself included; ``full_layers`` are
    the layers without it. ``local_rope``: rotary settings of the layers with a window, where they have their
    own (Gemma-3). ``wide_norms``: norm weights are fp32 in any dtype, and a norm is rounded once, after its
    weight. ``post_norms``: outputs of attention and MLP are normed before they join the hidden
    states. ``query_scalar`` > 0 replaces head_dim in the attention scale; ``attention_softcap`` and
    ``logit_softcap`` > 0 cap scores (before the mask) and logits: cap · tanh(x / cap). ``embedding_scale``
    multiplies embedded tokens, rounded to their dtype.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: float = 1e-6
    mlp: Literal["silu_gated", "gelu_tanh_gated", "gelu", "gelu_tanh", "relu"] = "silu_gated"
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    logn_length: int = 0
    sliding_window: int = 0
    full_layers: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    wide_norms: bool = False
    post_norms: bool = False
    query_scalar: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    wiring: Wiring = "none"
    encoder: EncoderConfig | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                raise ConfigError(f"{name} is out of range", seen=value, allowed=f"1 to {most}")
        if not 0 < self.norm_eps < math.inf:
            raise ConfigError("norm_eps must be positive", seen=self.norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_heads must be a multiple of num_kv_heads", seen=(self.num_heads, self.num_kv_heads)
            )
        for name in ("query_scalar", "attention_softcap", "logit_softcap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is out of range", seen=getattr(self, name), allowed="0 or positive"
                )
        if not 0 < self.embedding_scale < math.inf:
            raise ConfigError("embedding_scale must be positive", seen=self.embedding_scale)
        if (self.wide_norms or self.post_norms) and self.norm != "rms_norm":
            raise ConfigError("wide norms and post-norms must be RMSNorms", seen=self.norm)
        self._check_local_rope()
        encoder = self.encoder
        if self.wiring not in ("none", "prefix", "cross"):
            raise ConfigError("unknown wiring of a model", seen=self.wiring, allowed="none, prefix, cross")
        if (self.wiring == "none") != (encoder is None):
            raise ConfigError("a model has an encoder unless its wiring is none", seen=self.wiring)
        if encoder is None or self.crosses:
            return
        if encoder.hidden_size != self.hidden_size:
            raise ConfigError(
                "an encoder whose outputs stand in the prompt has the decoder's hidden_size",
                seen=encoder.hidden_size,
                allowed=self.hidden_size,
            )
        if encoder.placeholder_id >= self.vocab_size:
            raise ConfigError(
                "placeholder_id is outside the vocabulary",
                seen=encoder.placeholder_id,
                allowed=f"0 to {self.vocab_size - 1}",
            )

    def _check_local_rope(self) -> None:
        """Layers of both kinds read the same rows of tables of one shape."""
        if self.local_rope is None:
            return
        if self.rope is None or self.rope.dim != self.local_rope.dim:
            seen = self.local_rope.dim, None if self.rope is None else self.rope.dim
            raise ConfigError("rotary settings of layers with a window must have the others' dim", seen=seen)
        if "qwen_ntk" in (self.rope.scaling, self.local_rope.scaling):
            raise ConfigError("qwen_ntk cannot scale one kind of layers alone", seen=self.rope.scaling)

    @property
    def crosses(self) -> bool:
        """Whether every layer attends to the encoder's outputs."""
        return self.wiring == "cross"

    @property
    def splices(self) -> bool:
        """Whether the encoder's outputs stand in the prompt."""
        return self.wiring == "prefix"

    @property
    def placeholders(self) -> int:
        """Prompt tokens that an input takes at most; 0 where inputs are not in the prompt."""
        return self.encoder.max_positions if self.splices and self.encoder is not None else 0

    @property
    def modality(self) -> Modality:
        """What the model takes besides token ids."""
        return TEXT if self.encoder is None else modality_named(self.encoder.modality)

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """Factor on query·key: 1/sqrt(head_dim), or of ``query_scalar``."""
        return 1.0 / math.sqrt(self.query_scalar or self.head_dim)

    @property
    def gated(self) -> bool:
        """Whether the MLP is down(act(gate(x)) · up(x))."""
        return self.mlp.endswith("_gated")

    @property
    def activation(self) -> Activation:
        """The MLP's activation, of the gate where it is gated."""
        return self.mlp.removesuffix("_gated")  # type: ignore[return-value]

    def window(self, layer: int) -> int:
        """Tokens that a query of a layer sees, itself included; 0: all."""
        return 0 if layer in self.full_layers else self.sliding_window

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Rotary settings of a layer; None: positions are learned."""
        return self.local_rope if self.local_rope is not None and self.window(layer) else self.rope

    def cut(self, start: int, end: int) -> DecoderConfig:
        """The config of the layers [start, end) alone."""
        full = tuple(layer - start for layer in self.full_layers if start <= layer < end)
        return self.replace(num_layers=end - start, full_layers=full)
