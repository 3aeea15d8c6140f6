"""The shape of an encoder of a request's inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ingot.config.json_config import JsonConfig
from ingot.config.modality import modality_named
from ingot.errors import ConfigError

Wiring = Literal["none", "prefix", "cross"]
_MOST_POSITIONS = 1 << 20
# As for decoders: a file that says more is damaged.
_MOST = {"hidden_size": 1 << 18, "intermediate_size": 1 << 20, "num_layers": 1 << 10}


@dataclass(frozen=True)
class EncoderConfig(JsonConfig):
    """An encoder of a request's inputs.

    Attributes:
        hidden_size: width of its outputs.
        max_positions: most outputs of one input.
        features: shape of an input; 0: any size from 1 on.
        activation_values: values per output that encoding holds at most.
        modality: of its inputs, a name in modality.py.
        placeholder_id: token id that stands in the prompt for an output (wiring ``prefix``).
        penalizes_prompt: ``repetition_penalty`` counts the whole prompt; False: its first token alone, as in
            originals whose prompts are embeddings.
        settings: JSON that only the architecture reads.
    """

    hidden_size: int
    max_positions: int
    features: tuple[int, ...]
    activation_values: int
    modality: str
    placeholder_id: int = 0
    penalizes_prompt: bool = True
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        modality_named(self.modality)
        if not 0 < self.max_positions <= _MOST_POSITIONS:
            raise ConfigError(
                "max_positions of the encoder is out of range",
                seen=self.max_positions,
                allowed=f"1 to {_MOST_POSITIONS}",
            )
        if self.hidden_size < 1 or self.activation_values < 1 or self.placeholder_id < 0:
            seen = (self.hidden_size, self.activation_values, self.placeholder_id)
            raise ConfigError("the encoder's sizes must be positive", seen=seen)
        if not self.features or any(not 0 <= size <= _MOST_POSITIONS for size in self.features):
            what = "features, the shape of an input, are out of range"
            raise ConfigError(what, seen=self.features, allowed=f"0 to {_MOST_POSITIONS} each")

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an input has the right shape."""
        if len(shape) != len(self.features):
            return False
        sizes = zip(shape, self.features, strict=True)
        return all(size == wanted or (wanted == 0 and size > 0) for size, wanted in sizes)


@dataclass(frozen=True)
class StackConfig(JsonConfig):
    """Bidirectional pre-norm layers with LayerNorm and biases (ViT, the encoder of Whisper)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    mlp_bias: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if odd := self.odd_fields():
            raise ConfigError("the encoder's settings have values of another type", seen=odd)
        for name, most in _MOST.items():
            if not 0 < getattr(self, name) <= most:
                what = f"{name} of the encoder is out of range"
                raise ConfigError(what, seen=getattr(self, name), allowed=f"1 to {most}")
        if self.num_heads < 1 or self.hidden_size % self.num_heads:
            seen = (self.num_layers, self.num_heads, self.hidden_size)
            raise ConfigError("num_heads must divide hidden_size of the encoder", seen=seen)
