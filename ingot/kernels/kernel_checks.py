"""What every kernel launcher checks before it touches memory.

Owns the error for arguments that a kernel cannot take, the choice between a kernel and its reference, and the
merging of tile choices. Knows no op.

    expect("weight", weight, (hidden,), like=x)
    if runs_on_gpu(x): ...
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.errors import DeviceError, IngotError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class KernelArgumentError(IngotError, ValueError):
    """A kernel was called with a tensor or a number it cannot take."""


def expect_float(name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` has one of the floating dtypes that kernels compute in."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise KernelArgumentError(f"{name} has the wrong dtype", seen=tensor.dtype, allowed=FLOAT_DTYPES)


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *,
    like: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise unless ``tensor`` has the shape, the dtype, the device and the unit last stride asked for.

    Args:
        name: what the caller calls it.
        tensor: what was given.
        shape: sizes; None accepts any size in that dimension.
        like: a tensor of the same call; gives the device and, without ``dtype``, the dtype.
        dtype: the dtype wanted.
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
        raise KernelArgumentError(
            f"{name} is not contiguous in its last dimension",
            seen=tensor.stride(),
            fix="call .contiguous() first",
        )


def expect_heads(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Raise unless ``tensor`` is [rows, heads, head_dim], each row contiguous, head_dim 8 to 256."""
    expect(name, tensor, (None, None, None), like=like)
    expect_range("head_dim", tensor.shape[2], 8, 256)
    if tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]:
        raise KernelArgumentError(
            f"{name} is not contiguous within a row", seen=tensor.stride(), fix="call .contiguous() first"
        )


def _fits(sizes: torch.Size, shape: tuple[int | None, ...]) -> bool:
    """Whether sizes are those asked for; it runs several times a launch, so a loop and no generator."""
    if len(sizes) != len(shape):
        return False
    for size, want in zip(sizes, shape, strict=True):  # noqa: SIM110
        if want is not None and size != want:
            return False
    return True


def expect_result(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Raise unless ``tensor`` can receive a result: contiguous, with the shape, dtype and device of
    ``like``.
    """
    expect(name, tensor, tuple(like.shape), like=like)
    if not tensor.is_contiguous():
        raise KernelArgumentError(f"{name} is not contiguous", seen=tensor.stride())


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
    """Raise unless a static scale is one number on the device of ``like``."""
    if static is not None:
        expect("static", static, (1,), like=like, dtype=torch.float32)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 under the interpreter."""
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
        raise DeviceError(
            "the tensor is not on the current GPU",
            seen=x.device,
            allowed=f"cuda:{torch.cuda.current_device()}",
            fix="torch.cuda.set_device",
        )
    return True


# Tiles that may be any number, and those that are off at 0.
COUNTS = frozenset({"AHEAD", "DIRECT", "MAX_SPLITS", "PREFETCH", "PROGRAMS", "SPLITS", "num_stages"})
OFF_AT_0 = frozenset({"AHEAD", "DIRECT", "FRAGMENTS", "MORE_N", "PREFETCH", "PROGRAMS", "WIDE"})


def merge_tiles(defaults: Mapping[str, int], tiles: Mapping[str, int] | None) -> dict[str, int]:
    """The op's default tile choices with the caller's put over them.

    Raises:
        KernelArgumentError: a name the op does not have, or a number that the tile cannot be.
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
