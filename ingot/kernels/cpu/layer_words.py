"""What a decode step in one call reads: the shape that all layers share, and its words by name.

read = reader(f)
keys = read("keys")                             # a word of %layer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ingot.kernels.cpu.function_text import Function
from ingot.kernels.cpu.panel_packing import ARGUMENTS, LANES

CROSS_PRODUCTS = ("query", "cross_output")
PRODUCT_WORDS = len(ARGUMENTS) + 1
LAYER_WORDS = (
    "norm", "norm_bias", "cross_norm", "cross_norm_bias", "mlp_norm", "mlp_norm_bias", "q_norm", "k_norm",
    "keys", "values", "encoded_keys", "encoded_values", "table", "window",
)  # fmt: skip
SHARED_WORDS = (
    "layers", "rows", "hidden", "normed", "qkv", "query", "attended", "up", "inner",
    "scores", "score_stride", "final_norm", "final_norm_bias", "rope_rows", "slots",
    "lengths", "blocks", "block_stride", "encoded_lengths", "encoded_blocks", "encoded_stride", "met",
)  # fmt: skip
_NUMBERS = ("layers", "rows", "window", "score_stride", "block_stride", "encoded_stride")
Activation = Literal["silu_gated", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class CacheShape:
    """Tokens of a block; ``strides``: of block, head and token, in values."""

    block_size: int
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class CpuLayerShape:
    """What is the same in all layers.

    Attributes:
        rotary: channels of a head that are rotated; 0: positions are learned.
        norm_bias: norms are LayerNorm, otherwise RMSNorm.
        mlp: its activation; with ``silu_gated`` the up product's outputs are gate and up.
        cache: keys and values of own tokens.
        encoded: of an encoder's outputs, which layers with cross-attention read.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    eps: float
    scale: float
    qk_norm: bool
    norm_bias: bool
    mlp: Activation
    cache: CacheShape
    encoded: CacheShape | None = None

    @property
    def fits(self) -> bool:
        """Whether vectors fill what they are used for."""
        whole = self.hidden % 16 == 0 and self.inner % 16 == 0
        return whole and self.head_dim % 8 == 0 and self.rotary % 8 == 0 and self.head_dim <= 256

    @property
    def products(self) -> tuple[str, ...]:
        """A layer's products in order."""
        return ("qkv", "output", *(CROSS_PRODUCTS if self.encoded else ()), "up", "down")

    @property
    def layer_size(self) -> int:
        """Words of a layer."""
        return len(LAYER_WORDS) + len(self.products) * PRODUCT_WORDS

    @property
    def widths(self) -> dict[str, int]:
        """Values of a row of each buffer; a product's outputs are whole blocks."""
        queries, values = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "hidden": self.hidden,
            "normed": self.hidden,
            "qkv": -(-(queries + 2 * values) // LANES) * LANES,
            "query": -(-queries // LANES) * LANES if self.encoded else 0,
            "attended": queries,
            "up": self.inner * (2 if self.mlp == "silu_gated" else 1),
            "inner": self.inner,
        }


def reader(f: Function) -> Callable[[str], str]:
    """Reads a word of %shared or %layer by its name."""

    def read(name: str) -> str:
        base, words = ("%layer", LAYER_WORDS) if name in LAYER_WORDS else ("%shared", SHARED_WORDS)
        return f.word(base, words.index(name), "i64" if name in _NUMBERS else "ptr")

    return read
