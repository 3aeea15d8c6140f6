"""A model in one or several GGUF files (llama.cpp): its metadata, and its tensors some rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.checkpoint.checkpoint_files import list_files, shorten
from ingot.checkpoint.gguf.gguf_header import AGAIN, GgufTensor, Header
from ingot.checkpoint.gguf.gguf_parts import SUFFIX, is_suffixed, models_of, only_gguf, part_of
from ingot.errors import CheckpointError, NoSuchPathError

_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_OWN = (_NUMBER, "general.alignment")  # keys of each part
_ONE_MODEL = "download all parts again, from one repository and of one revision"


@dataclass(frozen=True)
class GgufFile:
    """A model's metadata by key (lists for arrays), and its tensors by llama.cpp's names in the order of the
    files. ``path`` is the file that was opened; of several parts any one.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read a file's header, and those of its other parts; their tensors are not read.

        Raises CheckpointError for a file that is missing, damaged, big-endian, of an unknown version, or with
        tensors of an unsupported type; for parts that are missing or of different models.
        """
        header = Header.read(path)
        count = header.metadata.get(_COUNT, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise CheckpointError(
                f"unsupported {_COUNT} in {path}", seen=count, allowed="1 or more", fix=AGAIN
            )
        return cls(path, header.metadata, header.tensors) if count == 1 else _joined(path, count)

    def blocks(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The bytes of a tensor's rows from ``start`` to ``stop`` (None: all), uint8 [rows, bytes per row];
        a tensor of one dimension is one row.
        """
        tensor = self.tensors[name]
        rows = (tensor.num_rows if stop is None else stop) - start
        size = tensor.num_bytes // tensor.num_rows
        try:
            found = np.fromfile(tensor.path, np.uint8, rows * size, offset=tensor.offset + start * size)
        except OSError as error:
            raise CheckpointError(f"cannot read {tensor.path}", seen=error, fix=AGAIN) from error
        if found.size != rows * size:
            raise CheckpointError(f"{tensor.path} was truncated while it was read", seen=name, fix=AGAIN)
        return found.reshape(rows, size)


def is_gguf(path: Path) -> bool:
    """Whether a path is meant as such a file; it may not be there."""
    return is_suffixed(path.name) and not path.is_dir()


def gguf_at(path: Path) -> Path | None:
    """The GGUF file that a path means: the file, or the first one of the only model in a folder without other
    weights; None: neither.

    Raises NoSuchPathError for a folder with several models.
    """
    if is_gguf(path):
        return path
    names = list_files(path) if path.is_dir() else []
    if not only_gguf(names):
        return None
    models = models_of(names)
    if len(models) > 1:
        firsts = [files[0] for files in models]
        what, fix = f"{path} has several GGUF models", f"give the path of one, {path / firsts[0]}"
        raise NoSuchPathError(what, seen=shorten(firsts), allowed="one", fix=fix)
    return path / next(name for name in models[0] if name in names)


def _joined(path: Path, count: int) -> GgufFile:
    """All parts of the model that one of ``count`` parts belongs to."""
    part = part_of(path.name)
    if part is None or part.count != count:
        raise CheckpointError(
            f"{path} is one part of {count}, and its name does not say which",
            seen=path.name,
            allowed=f"NAME-00001-of-{count:05d}{SUFFIX}",
            fix="give the parts the names that they were downloaded from",
        )
    paths = [path.with_name(name) for name in part.names()]
    missing = [one.name for one in paths if not one.is_file()]
    if missing:
        raise CheckpointError(
            f"parts of {path} are missing ({len(missing)} of {count})",
            seen=shorten(missing),
            allowed=f"all {count} parts in {path.parent}",
            fix="download them into the same folder",
        )
    headers = [Header.read(one) for one in paths]
    for number, (one, header) in enumerate(zip(paths, headers, strict=True)):
        seen = header.metadata.get(_NUMBER), header.metadata.get(_COUNT)
        if seen != (number, count):
            raise _of_different_models(one, f"{_NUMBER} {seen[0]}, {_COUNT} {seen[1]}", f"{number}, {count}")
    return GgufFile(path, _metadata(paths, headers), _tensors(paths, headers))


def _metadata(paths: Sequence[Path], headers: Sequence[Header]) -> dict[str, Any]:
    """The first part's; where another repeats a key, both must agree."""
    first = headers[0].metadata
    for path, header in zip(paths[1:], headers[1:], strict=True):
        for key, value in header.metadata.items():
            if key in first and first[key] != value and key not in _OWN:
                raise _of_different_models(path, f"{key} {str(value)[:80]}", str(first.get(key))[:80])
    return first


def _tensors(paths: Sequence[Path], headers: Sequence[Header]) -> dict[str, GgufTensor]:
    """Of all parts, each once, and as many as the parts say."""
    found: dict[str, GgufTensor] = {}
    for path, header in zip(paths, headers, strict=True):
        twice = [name for name in header.tensors if name in found]
        if twice:
            other = found[twice[0]].path.name
            raise _of_different_models(
                path, f"{shorten(twice, 3)}, which {other} has too", "each tensor once"
            )
        found |= header.tensors
    total = headers[0].metadata.get(_TENSORS, len(found))
    if total != len(found):
        raise _of_different_models(paths[0], f"{len(found)} tensors in all parts", f"{_TENSORS} {total}")
    return found


def _of_different_models(path: Path, seen: str, allowed: str) -> CheckpointError:
    what = f"{path} does not belong to the other parts"
    return CheckpointError(what, seen=seen, allowed=allowed, fix=_ONE_MODEL)
