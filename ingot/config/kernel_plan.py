"""The kernel plan: which tiles each kernel uses, and where they were measured."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError

ROWS = "m"
_SMALL_BUCKET = 8
_KEY_PART = re.compile(r"([a-z]+)([1-9][0-9]*)")
_MAY_BE_NONE = ("FRAGMENTS", "PREFETCH", "PROGRAMS")
_ANY_SIZE = ("num_stages", "MAX_SPLITS", "REGISTERS", *_MAY_BE_NONE)  # the others are powers of two
_BLOCKS = ("BLOCK_N", "BLOCK_K", "BLOCK_T")
_PRODUCT = (*_BLOCKS, "FRAGMENTS", "PROGRAMS", "OVERLAP", "PREFETCH", "num_warps", "num_stages")
_HEADS = ("q", "kv", "d")


@dataclass(frozen=True)
class TunableOp:
    """What a plan may contain for an op.

    Attributes:
        tiles: the names of its tile sizes.
        dims: the parts of its keys, in order. ``m`` is a bucket of rows (for decode attention: requests; for
            prefill attention: tokens of the longest prompt). The others are sizes: ``n`` and ``k`` of a
                weight
            [n, k], ``h`` hidden, ``i`` of the gate, ``q`` and ``kv`` heads of ``d`` channels.
    """

    tiles: tuple[str, ...]
    dims: tuple[str, ...]


OPS: dict[str, TunableOp] = {
    "rms_norm": TunableOp(("num_warps", "OVERLAP"), (ROWS, "h")),
    "layer_norm": TunableOp(("num_warps", "OVERLAP"), (ROWS, "h")),
    "rope_kv_write": TunableOp(("BLOCK_HEADS", "num_warps", "OVERLAP"), (ROWS, *_HEADS)),
    "silu_mul": TunableOp(("BLOCK_I", "num_warps", "OVERLAP"), (ROWS, "i")),
    "paged_attention": TunableOp(  # AXIS, MERGE and EARLY where query heads share keys
        (
            *("BLOCK_N", "MAX_SPLITS", "MIN_SPLIT", "AXIS", "MERGE", "EARLY", "PREFETCH"),
            *("num_warps", "num_stages", "OVERLAP"),
        ),
        (ROWS, *_HEADS),
    ),
    "prefill_attention": TunableOp(
        ("BLOCK_M", "BLOCK_N", "REGISTERS", "OVERLAP", "num_warps", "num_stages"), (ROWS, *_HEADS)
    ),
    "small_linear": TunableOp(_PRODUCT, (ROWS, "n", "k")),
    "small_qkv": TunableOp(_PRODUCT, (ROWS, "n", "k")),
    "small_gate_up": TunableOp(_PRODUCT, (ROWS, "n", "k")),
}


def row_bucket(rows: int) -> int:
    """The largest number of rows that shares tiles with ``rows``: 1, 8, 16, 32 and further powers of two."""
    return 1 if rows <= 1 else max(1 << (rows - 1).bit_length(), _SMALL_BUCKET)


def plan_key(op: str, rows: int, shape: Mapping[str, int]) -> str:
    """The key of a shape: ``m8_n4096_k11008``."""
    dims = OPS[op].dims
    assert set(shape) == set(dims) - {ROWS}, (op, sorted(shape))
    return "_".join(f"{dim}{row_bucket(rows) if dim == ROWS else shape[dim]}" for dim in dims)


class TileTable:
    """The tiles of one op and shape by rows; looked up at every launch."""

    __slots__ = ("_by_bucket",)

    def __init__(self, by_bucket: Mapping[int, Mapping[str, int]]) -> None:
        self._by_bucket = {rows: dict(tiles) for rows, tiles in by_bucket.items()}

    def at(self, rows: int, over: Mapping[str, int] | None = None) -> dict[str, int] | None:
        """Tiles for this many rows, overridden by ``over``; None: the op's defaults."""
        found = self._by_bucket.get(row_bucket(rows))
        return {**(found or {}), **over} if over else found


@dataclass(frozen=True)
class MeasuredTimes(JsonConfig):
    """Microseconds of a call with the op's default tiles and with the best ones."""

    default_us: float
    best_us: float

    def __post_init__(self) -> None:
        for name in ("default_us", "best_us"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"{name} is not a time", seen=value, allowed="microseconds", field="plan")


@dataclass(frozen=True)
class PlanMachine:
    """What tile choices depend on besides shapes."""

    gpu: str
    capability: str
    value_bytes: int
    torch: str
    triton: str


@dataclass(frozen=True)
class KernelPlan(JsonConfig):
    """Tile choices by op and key, and where they were measured.

    Attributes:
        gpu: its name; None: nothing measured, defaults everywhere.
        capability: its compute capability, ``9.0``.
        value_bytes: bytes per value of the measured dtype.
        torch, triton: versions.
        tiles: by op and key, only where they beat the defaults.
        measured: by op and key, everything that was measured.

        plan = KernelPlan(gpu="NVIDIA H200", ..., tiles={"rms_norm": {"m8_h4096": {"num_warps": 8}}})
        plan.table("rms_norm", h=4096).at(rows=3)  # {"num_warps": 8}
    """

    gpu: str | None = None
    capability: str | None = None
    value_bytes: int | None = None
    torch: str | None = None
    triton: str | None = None
    tiles: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    measured: dict[str, dict[str, MeasuredTimes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sections: tuple[Mapping[str, Mapping[str, object]], ...] = (self.tiles, self.measured)
        for section in sections:
            unknown = sorted(set(section) - set(OPS))
            if unknown:
                what = "the plan names unknown kernels"
                raise ConfigError(what, seen=unknown, allowed=list(OPS), field="plan")
            for op, entries in section.items():
                odd = [key for key in entries if not _is_key(op, key)]
                if odd:
                    form = "_".join(f"{dim}<number>" for dim in OPS[op].dims)
                    raise ConfigError(f"{op} has no such keys", seen=odd, allowed=form, field="plan")
        for op, choices in self.tiles.items():
            names = OPS[op].tiles
            for key, sizes in choices.items():
                odd = sorted(set(sizes) - set(names))
                if odd:
                    raise ConfigError(f"{op} has no such tiles", seen=odd, allowed=list(names), field="plan")
                bad = {name: size for name, size in sizes.items() if not _is_size(name, size)}
                if bad:
                    what = f"tile sizes of {op}, {key} are out of range"
                    raise ConfigError(what, seen=bad, allowed="powers of two", field="plan")
        machine = ["gpu", "capability", "value_bytes", "torch", "triton"]
        if self.tiles and not all(getattr(self, name) for name in machine):
            what = "the plan must say where it was measured"
            raise ConfigError(what, field="plan", fix=f"`plan`, fields {machine}")

    @property
    def num_choices(self) -> int:
        """Number of keys with tiles other than the defaults."""
        return sum(map(len, self.tiles.values()))

    def table(self, op: str, **shape: int) -> TileTable:
        """The tiles of one op for one shape."""
        choices = self.tiles.get(op, {})
        suffix = plan_key(op, 1, shape).partition("_")[2]
        found = (key.partition("_") for key in choices)
        return TileTable({int(m[1:]): choices[f"{m}_{rest}"] for m, _, rest in found if rest == suffix})

    def why_unfit(self, here: PlanMachine) -> str | None:
        """Why the tiles cannot be used on a machine, where they may not even launch; None where they can, or
        there are none.
        """
        if not self.tiles:
            return None
        pairs = {
            "GPU": (f"{self.gpu} ({self.capability})", f"{here.gpu} ({here.capability})"),
            "bytes per value": (self.value_bytes, here.value_bytes),
            "Triton": (_series(self.triton or ""), _series(here.triton)),
        }
        odd = [f"{name} {a}, not {b}" for name, (a, b) in pairs.items() if a != b]
        return f"measured with {'; '.join(odd)}" if odd else None


def _series(version: str) -> str:
    """``3.6.0+git`` → ``3.6``."""
    return ".".join(version.split(".")[:2])


def _is_key(op: str, key: str) -> bool:
    parts = [_KEY_PART.fullmatch(part) for part in key.split("_")]
    found = [(part[1], int(part[2])) for part in parts if part is not None]
    sizes = dict(found)
    whole = len(found) == len(parts) and tuple(name for name, _ in found) == OPS[op].dims
    return whole and row_bucket(sizes[ROWS]) == sizes[ROWS]


def _is_size(name: str, size: object) -> bool:
    least = 0 if name in _MAY_BE_NONE else 1
    whole = isinstance(size, int) and not isinstance(size, bool) and size >= least
    return whole and (name in _ANY_SIZE or size & (size - 1) == 0)  # type: ignore[operator]
