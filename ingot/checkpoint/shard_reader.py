"""One weight file, safetensors or torch's: what is in it, and its tensors one at a time.

Torch's zip files are memory-mapped, the older ones read whole; pickles that hold code are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ingot.checkpoint.checkpoint_files import shorten
from ingot.errors import CheckpointError

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPES = frozenset(_SAFETENSORS_DTYPES.values())
_ZIP_MAGIC = b"PK\x03\x04"
# The first pickle of torch's format before 1.6: protocol 2, the number 0x1950a86a20f9469cfc6c.
_LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
_LFS_POINTER = b"version https://git-lfs"
_CONVERT = "convert it to safetensors in an environment that you trust, or download the safetensors files"
_AGAIN = "download the file again and compare its size or hash"


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a stored tensor without reading it: shape, dtype, and the name of its file.

    ``default``: the dtype that an engine stores it in by default; None: ``dtype``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    default: torch.dtype | None = None


class Shard(Protocol):
    """An open weight file."""

    def infos(self) -> dict[str, TensorInfo]:
        """Every tensor in the file; CheckpointError for a dtype or layout that is not supported."""

    def read(self, name: str) -> torch.Tensor:
        """A CPU tensor whose storage no other tensor shares; it may be a private mapping of the file."""

    def close(self) -> None:
        """Let go of the file; tensors already read stay valid."""


def open_shard(path: Path, inner: str | None = None) -> Shard:
    """Open a ``.safetensors`` file, or one written by ``torch.save``.

    ``inner`` is the key under which a torch file nests its tensors. Raises CheckpointError for a file that is
    missing, damaged, of an unknown format, or a pickle that holds code.
    """
    head = _head(path)
    if path.suffix == ".safetensors":
        return _SafetensorsShard(path)
    return _TorchShard(path, _tensors(path, _unpickled(path, head, skip_data=False), inner))


def scan_shard(path: Path, inner: str | None = None) -> dict[str, TensorInfo]:
    """What a weight file holds, without reading its tensors; arguments and errors as ``open_shard``."""
    head = _head(path)
    if path.suffix == ".safetensors":
        shard = _SafetensorsShard(path)
        infos = shard.infos()
        shard.close()
        return infos
    return _TorchShard(path, _tensors(path, _unpickled(path, head, skip_data=True), inner)).infos()


def read_values(path: Path) -> dict[str, object]:
    """What a torch file holds by name at its top level, tensors without data; errors as ``open_shard``."""
    state = _unpickled(path, _head(path), skip_data=True)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no values by name", seen=type(state).__name__, allowed="dict")
    return {str(name): value for name, value in state.items()}


class _SafetensorsShard:
    """A safetensors file; its header is checked against its size when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(path, error) from error

    def infos(self) -> dict[str, TensorInfo]:
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
        kinds = {name: part.get_dtype() for name, part in slices.items()}
        _check_kinds(self._path, {n: k for n, k in kinds.items() if k not in _SAFETENSORS_DTYPES})
        return {
            name: TensorInfo(tuple(part.get_shape()), _SAFETENSORS_DTYPES[kinds[name]], self._path.name)
            for name, part in slices.items()
        }

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self._path, error) from error
        return tensor

    def close(self) -> None:
        self._file = None


class _TorchShard:
    """A state dict: tensors of a mapped zip file, or in memory if the file is of the older format."""

    def __init__(self, path: Path, state: dict[str, torch.Tensor]) -> None:
        self._path = path
        self._state = state
        self._users = Counter(_storage(tensor) for tensor in state.values())

    def infos(self) -> dict[str, TensorInfo]:
        _check_kinds(self._path, {n: _kind(t) for n, t in self._state.items() if _kind(t) not in _DTYPES})
        return {n: TensorInfo(tuple(t.shape), t.dtype, self._path.name) for n, t in self._state.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor = self._state[name].detach()
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return tensor if whole and self._users[_storage(tensor)] == 1 else tensor.clone()

    def close(self) -> None:
        self._state = {}


class OpenShard:
    """The one weight file of a checkpoint that is open."""

    def __init__(self) -> None:
        self._shard: Shard | None = None
        self._path = Path()

    def read(self, path: Path, inner: str | None, name: str) -> torch.Tensor:
        """A tensor of a file, which is opened unless it is the last one; errors as ``open_shard``."""
        if self._shard is None or self._path != path:
            self.close()
            self._shard, self._path = open_shard(path, inner), path
        return self._shard.read(name)

    def close(self) -> None:
        """Let go of the file; tensors already read stay valid."""
        if self._shard is not None:
            self._shard.close()
        self._shard = None


def _head(path: Path) -> bytes:
    """The first bytes of a file that is there and is more than a pointer to one."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}", seen=error, fix="check that it is there") from error
    if head.startswith(_LFS_POINTER):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights", fix="run `git lfs pull`")
    return head


def _unpickled(path: Path, head: bytes, skip_data: bool) -> object:
    """Unpickle tensors and plain values only; with ``skip_data`` the tensors are on the meta device."""
    is_zip = head.startswith(_ZIP_MAGIC)
    if not head:
        raise CheckpointError(f"{path} is empty", fix=_AGAIN)
    if not is_zip and not head.startswith(_LEGACY_MAGIC):
        if head.startswith(b"\x80"):
            what = f"{path} is a plain pickle, which can run code; not loaded"
            raise CheckpointError(what, fix=_CONVERT)
        raise CheckpointError(f"{path} is not a torch.save file", seen=head[:16], fix=_AGAIN)
    device = "meta" if skip_data else "cpu"
    try:
        state: object = torch.load(
            path, map_location=device, weights_only=True, mmap=is_zip and not skip_data
        )
    # The parser of an untrusted file raises whatever the damage leads to: KeyError, EOFError, struct.error.
    except Exception as error:
        # torch's restricted unpickler says whether it met code or damage.
        text = str(error)
        found = re.search(r"GLOBAL ([\w.]+)", text)
        if found or "TorchScript" in text or ("Weights only load failed" in text and "nsupported" in text):
            seen = found.group(1) if found else "TorchScript" if "TorchScript" in text else text[-200:]
            what = f"{path} holds code, not only tensors; not loaded"
            raise CheckpointError(what, seen=seen, fix=_CONVERT) from error
        raise _damaged(path, error) from error
    return state


def _tensors(path: Path, state: object, inner: str | None) -> dict[str, torch.Tensor]:
    """The tensors of a state dict; what is no tensor (an epoch, a version) is no weight and is left out."""
    keys = sorted(map(str, state)) if isinstance(state, dict) else [type(state).__name__]
    if inner is not None and isinstance(state, dict):
        state = state.get(inner)
    if isinstance(state, dict):
        tensors = {n: t for n, t in state.items() if isinstance(n, str) and isinstance(t, torch.Tensor)}
        if tensors:
            return tensors
    where = f"under the key {inner!r}" if inner else "at its top level"
    raise CheckpointError(f"{path} holds no tensors {where}", seen=shorten(keys), allowed="name to tensor")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _kind(tensor: torch.Tensor) -> object:
    return tensor.dtype if tensor.layout == torch.strided else tensor.layout


def _check_kinds(path: Path, bad: dict[str, Any]) -> None:
    if not bad:
        return
    raise CheckpointError(
        f"{path} has tensors of a dtype that is not supported",
        seen=shorten([f"{name}: {str(kind).removeprefix('torch.')}" for name, kind in bad.items()]),
        allowed=", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _DTYPES)),
        fix="convert them to a supported dtype",
    )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    detail = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return CheckpointError(f"{path} is truncated or damaged", seen=detail, fix=_AGAIN)
