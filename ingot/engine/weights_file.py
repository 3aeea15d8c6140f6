"""weights.safetensors, written and read one tensor at a time: the library's own writer wants all in memory at
once.

Format: 8 bytes little-endian header length, JSON header, then the tensors' bytes in header order.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from safetensors import SafetensorError

from ingot.config.files.json_text import MAX_BYTES, JsonError, parse_json
from ingot.engine.manifest import REBUILD, TensorEntry
from ingot.errors import EngineError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_SIZES = {name: dtype.itemsize for dtype, name in _NAMES.items()}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order, as they are stored and hashed."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def header_bytes(entries: Mapping[str, TensorEntry]) -> bytes:
    header, offset = {}, 0
    for name, entry in entries.items():
        end = offset + math.prod(entry.shape) * _SIZES.get(entry.dtype, 0)
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """A block that reads a weights file.

    Raises:
        EngineError: it cannot be read.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{path.name} cannot be read", seen=f"{path}: {error}", fix=REBUILD) from None


class WeightsWriter:
    """Writes tensors in the order of ``layout``, whose tensors (also meta) give shape and dtype."""

    def __init__(self, path: Path, layout: Mapping[str, torch.Tensor]) -> None:
        self._layout = layout
        self._pending = list(layout)
        self._file: BinaryIO = path.open("wb")
        self.entries: dict[str, TensorEntry] = {}
        unhashed = {n: TensorEntry(_NAMES[t.dtype], tuple(t.shape), "") for n, t in layout.items()}
        self._file.write(header_bytes(unhashed))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor of the layout, with its shape and dtype."""
        expected = self._layout[name]
        assert name == self._pending.pop(0), f"{name} out of order"
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), name
        raw = tensor_bytes(tensor)
        self._file.write(raw)
        digest = hashlib.sha256(raw).hexdigest()
        self.entries[name] = TensorEntry(_NAMES[tensor.dtype], tuple(tensor.shape), digest)

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._pending, f"not written: {self._pending[:3]}"
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


class WeightsReader:
    """Tensors of a file that ``WeightsWriter`` wrote, as views of a private mapping of it.

    Pages that were read count as this process's memory until ``release``, after which they come from the
    system's cache again.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                self._header = parse_json(file.read(min(size, MAX_BYTES)))
            except JsonError as error:
                seen = f"{path}: {error}"
                raise EngineError("the weights cannot be read", seen=seen, fix=REBUILD) from None
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._start = 8 + size

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, which must not be written; pages are read when values are used."""
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        dtype = next(d for d, stored in _NAMES.items() if stored == entry["dtype"])
        if begin == end:
            return torch.empty(entry["shape"], dtype=dtype)
        count = (end - begin) // dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=dtype, offset=self._start + begin, count=count)
        return flat.view(entry["shape"])

    def release(self) -> None:
        """Let go of the pages that were read; tensors stay valid."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
