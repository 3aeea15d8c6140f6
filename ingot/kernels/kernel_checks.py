"""What kernel launchers share: argument checks, the choice between kernel and reference, tile choices.

expect("weight", weight, (hidden,), like=x)
if runs_on_gpu(x): ...
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.errors import DeviceError, IngotError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class KernelArgumentError(IngotError, ValueError):
    """A shape, dtype, device, stride or number that a kernel cannot take. Every op of this room raises it."""


def expect_float(name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` is fp16, bf16 or fp32."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise KernelArgumentError(f"{name} has the wrong dtype", seen=tensor.dtype, allowed=FLOAT_DTYPES)


def expect_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` is [rows, columns] of fp16, bf16 or fp32."""
    expect_float(name, tensor)
    expect(name, tensor, (None, None), like=tensor)


def expect_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` is contiguous."""
    if not tensor.is_contiguous():
        raise KernelArgumentError(f"{name} is not contiguous", seen=tensor.stride())


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *,
    like: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise unless ``tensor`` has this shape (None: any size) and dtype (None: that of ``like``), lies on the
    device of ``like``, and has unit stride in its last dimension.
    """
    wanted = like.dtype if dtype is None else dtype
    if tensor.dtype != wanted:
        raise KernelArgumentError(f"{name} has the wrong dtype", seen=tensor.dtype, allowed=wanted)
    if tensor.device != like.device:
        raise KernelArgumentError(f"{name} is on another device", seen=tensor.device, allowed=like.device)
    sizes = tensor.shape
    if sizes != shape and not _fits(sizes, shape):
        allowed = tuple("any" if size is None else size for size in shape)
        raise KernelArgumentError(f"{name} has the wrong shape", seen=tuple(sizes), allowed=allowed)
    if sizes and sizes[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel() > 1:
        what = f"{name} is not contiguous in its last dimension"
        raise KernelArgumentError(what, seen=tensor.stride(), fix="call .contiguous() first")


def _fits(sizes: torch.Size, shape: tuple[int | None, ...]) -> bool:
    """Whether sizes match; a loop and no generator, because it runs several times per launch."""
    if len(sizes) != len(shape):
        return False
    for size, want in zip(sizes, shape, strict=True):  # noqa: SIM110
        if want is not None and size != want:
            return False
    return True


def expect_range(name: str, value: int, low: int, high: int | None = None) -> None:
    """Raise unless ``low <= value`` and, with ``high``, ``value <= high``."""
    if value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        raise KernelArgumentError(f"{name} is out of range", seen=value, allowed=allowed)


def expect_group(num_heads: int, num_kv_heads: int) -> None:
    """Raise unless query heads divide evenly among key-value heads."""
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise KernelArgumentError(
            "query heads must be a multiple of key-value heads", seen=f"{num_heads} and {num_kv_heads}"
        )


def expect_static(static: torch.Tensor | None, like: torch.Tensor) -> None:
    """Raise unless a static scale is fp32 [1] on the device of ``like``."""
    if static is not None:
        expect("static", static, (1,), like=like, dtype=torch.float32)


def described_gpu(device: torch.device) -> torch.device:
    """The device, but of the meta device this machine's current GPU, if there is one: nothing is computed on
    meta tensors, and what is said of them is of what would run.
    """
    if device.type == "meta" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 under the interpreter."""
    device = described_gpu(device)
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def runs_on_gpu(x: torch.Tensor) -> bool:
    """True when the op launches its Triton kernel, False when it runs its reference.

    Raises:
        DeviceError: the tensor is on a GPU that is not the current one, or on neither a GPU nor the CPU.
    """
    if x.device.type == "cpu":
        return False
    if x.device.type != "cuda":
        raise DeviceError("no kernel for this device", seen=x.device, allowed="cuda, cpu")
    if x.device.index != torch.cuda.current_device():
        current = f"cuda:{torch.cuda.current_device()}"
        what = "the tensor is not on the current GPU"
        raise DeviceError(what, seen=x.device, allowed=current, fix="torch.cuda.set_device")
    return True


# Tiles that need not be powers of two, and those that are off at 0.
COUNTS = frozenset(
    {"AHEAD", "DIRECT", "FRAGMENTS", "GROUPS", "MAX_SPLITS", "PREFETCH", "PROGRAMS", "SPLITS", "num_stages"}
)
OFF_AT_0 = frozenset(
    {"AHEAD", "DIRECT", "EARLY", "EXACT", "FRAGMENTS", "MORE_N", "PIECE", "PREFETCH", "PROGRAMS", "WIDE"}
)


def merge_tiles(defaults: Mapping[str, int], tiles: Mapping[str, int] | None) -> dict[str, int]:
    """The op's default tile choices with the caller's put over them.

    Raises:
        KernelArgumentError: a tile that the op does not have, or a value that the tile cannot have.
    """
    if not tiles:
        return dict(defaults)
    unknown = sorted(set(tiles) - set(defaults))
    if unknown:
        raise KernelArgumentError("unknown tile choice", seen=unknown, allowed=sorted(defaults))
    for name, value in tiles.items():
        least = 0 if name in OFF_AT_0 else 1
        if not isinstance(value, int) or value < least:
            raise KernelArgumentError(f"tile {name} is too small", seen=value, allowed=f"{least} or more")
        if name not in COUNTS and value & (value - 1):
            raise KernelArgumentError(f"tile {name} must be a power of two", seen=value)
    return {**defaults, **tiles}


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 for n < 2)."""
    return 1 << max(n - 1, 0).bit_length()
