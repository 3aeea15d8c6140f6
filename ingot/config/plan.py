"""Which tiles each kernel uses.

Owns the kernel plan: per op a mapping of tile names to sizes, and the GPU on which they were measured. Knows
no kernel; an op without an entry uses its own defaults.

    KernelPlan(gpu="NVIDIA H200", tiles={"rms_norm": {"num_warps": 8}})
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ingot.config.base import JsonConfig
from ingot.errors import ConfigError

OPS = (
    "rms_norm",
    "layer_norm",
    "rope_kv_write",
    "silu_mul",
    "paged_attention",
    "prefill_attention",
)


@dataclass(frozen=True)
class KernelPlan(JsonConfig):
    """Tile choices by op, and the GPU they were measured on (None: nothing measured, defaults)."""

    gpu: str | None = None
    tiles: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tiles) - set(OPS))
        if unknown:
            raise ConfigError("the plan names unknown kernels", seen=unknown, allowed=list(OPS), fix="--plan")
        for op, sizes in self.tiles.items():
            bad = {k: v for k, v in sizes.items() if isinstance(v, bool) or not isinstance(v, int) or v < 1}
            if bad:
                raise ConfigError(f"tile sizes of {op} must be integers >= 1", seen=bad, fix="--plan")

    def for_op(self, op: str) -> dict[str, int] | None:
        """Tiles of one op, or None where the op's defaults hold."""
        return self.tiles.get(op)
