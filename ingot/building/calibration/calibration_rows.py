"""Embeddings to calibrate with: rows of floats that stand where a text's would, from ``.npy`` files.

A file is one record [tokens, hidden_size], or many of one length [records, tokens, hidden_size], the shorter
ones padded with rows of zeros at either end. A folder's ``.npy`` files are records, in order of name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from ingot.building.calibration.calibration_data import CalibrationData
from ingot.building.calibration.sample_records import evenly
from ingot.errors import ConfigError

SUFFIX = ".npy"
SHAPES = "float16, float32 or float64 [tokens, {0}], or padded with zeros [records, tokens, {0}]"
PLACEHOLDER = 0  # the id that stands in a sample for a row; every vocabulary has it


def holds_rows(path: Path) -> bool:
    """Whether a file, or a folder by its files, is of embeddings."""
    return path.suffix == SUFFIX or (path.is_dir() and any(path.glob(f"*{SUFFIX}")))


def read_calibration_rows(path: Path, hidden_size: int, *, samples: int, length: int) -> CalibrationData:
    """At most ``samples`` records, evenly spread, each cut to ``length`` rows, without padding.

    Raises ConfigError where a file cannot be read, has another type or shape, or a record has no rows or
    values that are not finite.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    arrays = [(file, _opened(file, hidden_size)) for file in files]
    records = [(file, one) for file, array in arrays for one in (array if array.ndim == 3 else [array])]
    if not records:
        raise ConfigError("there are no embeddings to calibrate with", seen=path, field="calib")
    chosen = evenly(list(enumerate(records, start=1)), samples)
    kept = [_rows(file, number, one, length) for number, (file, one) in chosen]
    ids = tuple((PLACEHOLDER,) * len(one) for one in kept)
    return CalibrationData(path, ids, len(records), _sha256(files), embeddings=tuple(kept))


def _opened(file: Path, hidden_size: int) -> np.ndarray:
    """The array of a file, mapped and not read."""
    allowed = SHAPES.format(hidden_size)
    try:
        found = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        what = f"{file} cannot be read as embeddings"
        raise ConfigError(what, seen=error, allowed=allowed, field="calib") from None
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f" or found.ndim not in (2, 3):
        seen = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else "an archive"
        raise ConfigError(f"{file} has no embeddings", seen=seen, allowed=allowed, field="calib")
    if found.shape[-1] != hidden_size:
        what = f"{file} has rows of another hidden size"
        raise ConfigError(what, seen=list(found.shape), allowed=allowed, field="calib")
    return found


def _rows(file: Path, number: int, record: np.ndarray, length: int) -> torch.Tensor:
    """Float32 [tokens, hidden_size] without rows of zeros at the ends."""
    filled = np.flatnonzero((np.asarray(record) != 0).any(1))
    if not len(filled):
        raise ConfigError(f"record {number} has no rows but zeros", seen=file, field="calib")
    start = int(filled[0])
    rows = torch.from_numpy(np.array(record[start : min(int(filled[-1]) + 1, start + length)], np.float32))
    odd = int((~torch.isfinite(rows)).sum())
    if odd:
        seen = f"{file}: {odd} values"
        raise ConfigError(f"record {number} has values that are not finite", seen=seen, field="calib")
    return rows


def _sha256(files: list[Path]) -> str:
    """Of one file; of several with their names."""
    digest = hashlib.sha256()
    for file in files:
        if len(files) > 1:
            digest.update(f"{file.name}\n".encode())
        with file.open("rb") as opened:
            hashlib.file_digest(opened, lambda: digest)
    return digest.hexdigest()
