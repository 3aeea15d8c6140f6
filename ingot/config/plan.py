"""Which tiles each kernel uses.

Owns the kernel plan: per op a mapping of tile names to sizes, and the GPU on which they were measured. Knows
no kernel; an op without an entry uses its own defaults.

    KernelPlan(gpu="NVIDIA H200", tiles={"rms_norm": {"num_warps": 8}})
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ingot.config.base import JsonConfig
from ingot.errors import ConfigError

TILES: dict[str, tuple[str, ...]] = {
    "rms_norm": ("num_warps", "OVERLAP"),
    "layer_norm": ("num_warps", "OVERLAP"),
    "rope_kv_write": ("BLOCK_HEADS", "num_warps", "OVERLAP"),
    "silu_mul": ("BLOCK_I", "num_warps", "OVERLAP"),
    "paged_attention": ("BLOCK_N", "MAX_SPLITS", "MIN_SPLIT", "num_warps", "num_stages", "OVERLAP"),
    "prefill_attention": ("BLOCK_M", "BLOCK_N", "REGISTERS", "OVERLAP", "num_warps", "num_stages"),
}
_ANY_SIZE = ("num_stages", "MAX_SPLITS")  # the others are powers of two


@dataclass(frozen=True)
class KernelPlan(JsonConfig):
    """Tile choices by op, and the GPU they were measured on (None: nothing measured, defaults)."""

    gpu: str | None = None
    tiles: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tiles) - set(TILES))
        if unknown:
            raise ConfigError(
                "the plan names unknown kernels", seen=unknown, allowed=list(TILES), fix="--plan"
            )
        for op, sizes in self.tiles.items():
            odd = sorted(set(sizes) - set(TILES[op]))
            if odd:
                raise ConfigError(f"{op} has no such tiles", seen=odd, allowed=list(TILES[op]), fix="--plan")
            bad = {name: size for name, size in sizes.items() if not _is_size(name, size)}
            if bad:
                raise ConfigError(
                    f"tile sizes of {op} are out of range", seen=bad, allowed="powers of two", fix="--plan"
                )

    def for_op(self, op: str) -> dict[str, int] | None:
        """Tiles of one op, or None where the op's defaults hold."""
        return self.tiles.get(op)


def _is_size(name: str, size: object) -> bool:
    whole = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    return whole and (name in _ANY_SIZE or size & (size - 1) == 0)  # type: ignore[operator]
