"""The header of one GGUF file (llama.cpp): its metadata, and where its tensors are.

It is parsed here and not by the ``gguf`` package, whose reader follows any count that a file names.
Source: docs/gguf.md of ggml, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ingot.checkpoint.checkpoint_files import shorten
from ingot.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
AGAIN = "download the file again and compare its size or hash"
# A vocabulary of 256,000 tokens with its merges has 20 MB of metadata.
_MOST_BYTES, _MOST_ITEMS, _MOST_TENSORS, _MOST_FIELDS = 256 << 20, 1 << 22, 1 << 17, 1 << 16
_MOST_DIMS = 4
_ALIGNMENT = "general.alignment"
# Of metadata: type → how one value is stored.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class BlockType:
    """How a tensor's values are stored: ``values`` of them along the last dimension in ``bytes`` bytes."""

    id: int
    name: str
    values: int
    bytes: int


_BLOCKS = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (30, "BF16", 1, 2),
)
BLOCK_TYPES = {one[0]: BlockType(*one) for one in _BLOCKS}
_OTHER_NAMES = (
    {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
    | {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
    | {28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}
)


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor: its shape as PyTorch has it, its type, and where its bytes begin in which file."""

    shape: tuple[int, ...]
    type: BlockType
    offset: int
    path: Path

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.values * self.type.bytes


@dataclass(frozen=True)
class Header:
    """Metadata by key (lists for arrays), and tensors by llama.cpp's names in the order of the file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> Header:
        """Of one file; its tensors are not read.

        Raises CheckpointError for a file that is missing, damaged, big-endian, of an unknown version, or with
        tensors of an unsupported type.
        """
        try:
            with path.open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(0)
                return _HeaderReader(path, stream, size).read()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}", seen=error, fix="check that it is there") from error


class _HeaderReader:
    """The front of a file, read in order; every count is checked against what is left of the file."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self._path = path
        self._stream = stream
        self._size = size
        self._place = 0

    def read(self) -> Header:
        self._check_version()
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        self._check_count("tensors", num_tensors, _MOST_TENSORS, least=24)
        self._check_count("metadata fields", num_fields, _MOST_FIELDS, least=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._damaged(f"{key} twice")
            metadata[key] = self._value(key, self._scalar("I"))
        stored = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"{_ALIGNMENT} {alignment}")
        begin = -(-self._place // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in stored:
            if name in tensors:
                raise self._damaged(f"tensor {name} twice")
            tensors[name] = GgufTensor(shape, kind, begin + offset, self._path)
        self._check_places(tensors)
        return Header(metadata, tensors)

    def _check_version(self) -> None:
        magic = self._stream.read(4)
        self._place = 4
        if magic == _MAGIC[::-1]:
            raise self._big_endian()
        if magic != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file", seen=magic, allowed=_MAGIC, fix=AGAIN)
        version = self._scalar("I")
        if version and version & 0xFFFF == 0:
            raise self._big_endian()
        if version not in _VERSIONS:
            fix = "convert the model again with a llama.cpp of today"
            raise CheckpointError(
                f"{self._path} has an unsupported GGUF version", seen=version, allowed=_VERSIONS, fix=fix
            )

    def _big_endian(self) -> CheckpointError:
        fix = "download the little-endian file, or convert it with `gguf_convert_endian.py` of llama.cpp"
        return CheckpointError(f"{self._path} is a big-endian GGUF file", allowed="little-endian", fix=fix)

    def _take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        if count <= self._size - self._place and self._place + count > _MOST_BYTES:
            raise self._damaged(f"more than {_MOST_BYTES >> 20} MiB of metadata")
        found = self._stream.read(count) if count <= self._size - self._place else b""
        if len(found) != count:
            raise self._damaged(f"{count} bytes are needed at byte {self._place} of {self._size}")
        self._place += count
        return found

    def _scalar(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _string(self, what: str) -> str:
        text = self._take(self._scalar("Q"))
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8: {text[:40]!r}") from error

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._damaged(f"{key} of the unknown type {kind}")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner == _STRING:
            self._check_count(f"values of {key}", count, _MOST_ITEMS, least=8)
            return [self._string(key) for _ in range(count)]
        if inner not in _SCALARS:
            raise self._damaged(f"{key} is an array of the unsupported type {inner}")
        form = f"<{_SCALARS[inner]}"
        self._check_count(f"values of {key}", count, _MOST_ITEMS, least=struct.calcsize(form))
        return np.frombuffer(self._take(count * struct.calcsize(form)), form).tolist()

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """Name, shape, type and place of the next tensor, after the file's beginning of data."""
        name = self._string("a tensor's name")
        count = self._scalar("I")
        if not 1 <= count <= _MOST_DIMS:
            raise self._damaged(f"{name} has {count} dimensions")
        dims = struct.unpack(f"<{count}Q", self._take(8 * count))
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in BLOCK_TYPES:
            raise CheckpointError(
                f"{self._path} has a tensor of an unsupported quantization type",
                seen=f"{name}: {_OTHER_NAMES.get(kind, f'type {kind}')}",
                allowed=", ".join(one.name for one in BLOCK_TYPES.values()),
                fix="download the model in one of these types (Q4_K_M, Q8_0, …)",
            )
        found = BLOCK_TYPES[kind]
        if min(dims) < 1 or dims[0] % found.values:  # the first dimension is the innermost
            raise self._damaged(f"{name} of shape {list(dims)} as {found.name}")
        return name, dims[::-1], found, offset

    def _check_count(self, what: str, count: int, most: int, least: int) -> None:
        """``least``: bytes that one of them takes at least."""
        if count > most or count * least > self._size - self._place:
            raise self._damaged(f"{count} {what} in a file of {self._size} bytes")

    def _check_places(self, tensors: dict[str, GgufTensor]) -> None:
        beyond = [
            f"{name} (bytes {one.offset} to {one.offset + one.num_bytes})"
            for name, one in tensors.items()
            if one.offset + one.num_bytes > self._size
        ]
        if beyond:
            raise self._damaged(f"{len(beyond)} tensors beyond its {self._size} bytes: {shorten(beyond, 3)}")

    def _damaged(self, seen: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated or damaged", seen=seen, fix=AGAIN)
