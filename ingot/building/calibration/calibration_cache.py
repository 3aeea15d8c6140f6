"""Ranges of activations in a file beside the engine, so that a second build of the same data need not
calibrate again. Hessians are not kept: a 7B model's take 22 GB.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.config.files.atomic_write import atomic_file
from ingot.config.json_config import JsonConfig
from ingot.errors import IngotError
from ingot.quant.methods.activation_statistics import ChannelRange

_SUFFIX = ".calibration.safetensors"
_FIELDS = ("count", "lowest", "highest", "total_abs")


@dataclass(frozen=True)
class CalibrationKey(JsonConfig):
    """What ranges are of: equal keys, equal ranges.

    Attributes:
        checkpoint_sha256: of config.json and all files of weights.
        data_sha256: of the data file as it is.
        ids_sha256: of the samples' token ids, which tokenizer and chat template change.
        samples: how many; ``length``: most tokens of one.
        dtype: that weights are cast to before.
        layers: the range that was built; None: all.
    """

    checkpoint_sha256: str
    data_sha256: str
    ids_sha256: str
    samples: int
    length: int
    dtype: str
    layers: tuple[int, int] | None = None


def calibration_key(
    checkpoint: Checkpoint,
    data_sha256: str,
    samples: Sequence[Sequence[int]],
    length: int,
    dtype: str,
    layers: tuple[int, int] | None = None,
) -> CalibrationKey:
    """The key of a calibration; reads all of the checkpoint's files once (about a second per GB)."""
    ids = hashlib.sha256(json.dumps([list(one) for one in samples]).encode()).hexdigest()
    weights = checkpoint_sha256(checkpoint)
    return CalibrationKey(weights, data_sha256, ids, len(samples), length, dtype, layers)


def checkpoint_sha256(checkpoint: Checkpoint) -> str:
    """sha256 of config.json, in any order of its keys, and of every file that holds weights."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for name in sorted({info.file for info in checkpoint.tensors.values()}):
        digest.update(f"\n{name}\n".encode())
        with (checkpoint.folder / name).open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def cache_path(engine: Path) -> Path:
    """Where an engine's ranges are kept: beside its folder, not in it."""
    folder = engine.absolute()
    return folder.with_name(folder.name + _SUFFIX)


def write_ranges(path: Path, key: CalibrationKey, ranges: Mapping[str, ChannelRange]) -> None:
    """Store ranges by linear layer's name, whole or not at all; OSError where that fails."""
    tensors = {
        f"{name}/{field}": tensor for name, own in ranges.items() for field, tensor in own.tensors().items()
    }
    try:
        with atomic_file(path) as part:
            save_file(tensors, part, metadata={"key": _text(key)})
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path}: {error}") from None


def read_ranges(path: Path, key: CalibrationKey) -> dict[str, ChannelRange] | None:
    """The ranges of a file; None where there is none, it is damaged, or it has another key."""
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") != _text(key):
                return None
            for name in file.keys():  # noqa: SIM118
                linear, _, part = name.rpartition("/")
                found[linear][part] = file.get_tensor(name)
    except (OSError, SafetensorError, IngotError):
        return None
    if any(set(parts) != set(_FIELDS) for parts in found.values()):
        return None
    return {name: ChannelRange.from_tensors(parts) for name, parts in found.items()}


def _text(key: CalibrationKey) -> str:
    return json.dumps(key.to_json(), sort_keys=True)
