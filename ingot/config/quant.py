"""How weights are stored in fewer bits.

Owns the choice of a linear scheme. Knows nothing of how a scheme packs or computes.

    QuantConfig(scheme="none")
"""

from __future__ import annotations

from dataclasses import dataclass

from ingot.config.base import JsonConfig
from ingot.errors import ConfigError

SCHEMES = ("none",)


@dataclass(frozen=True)
class QuantConfig(JsonConfig):
    """``scheme`` names the linear scheme; ``none`` keeps weights in the engine's dtype."""

    scheme: str = "none"

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ConfigError(
                "unknown quantization scheme", seen=self.scheme, allowed=list(SCHEMES), fix="--quant"
            )
