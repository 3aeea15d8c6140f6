"""A delta merged with its base: a checkpoint folder that appears whole or not at all.

Covers which files the folder has. Does not know how tensors are added (checkpoint/weight_delta.py).

    merge_delta("llama-7b", "lmsys/vicuna-7b-delta-v0", "vicuna-7b")
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from ingot.checkpoint.checkpoint_files import CONFIG, list_files
from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.checkpoint_writer import INDEX, write_tensors
from ingot.checkpoint.hub import has_tokenizer, resolve_checkpoint, small_files
from ingot.checkpoint.shard_reader import TensorInfo
from ingot.checkpoint.weight_delta import added_rows, check_pair, merged_tensors, tensor_names
from ingot.engine.staging import FolderKind, new_parents, staged_folder
from ingot.errors import BuildError

Progress = Callable[[str, int, int], None]
_MERGED = FolderKind(
    "checkpoint", "a checkpoint", lambda path: (path / CONFIG).is_file() and (path / INDEX).is_file()
)


@dataclass(frozen=True)
class Merge:
    """What was written.

    Attributes:
        folder: the checkpoint.
        tensors: how many it has.
        added_rows: tokens that the delta has beyond the base's.
        size: bytes of its tensors.
        notes: what the check of the pair could not tell.
    """

    folder: Path
    tensors: int
    added_rows: int
    size: int
    notes: tuple[str, ...]


def merge_delta(
    base: str | Path,
    delta: str | Path,
    out: str | Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Merge:
    """Write base + delta as a Hugging Face folder with the delta's config and tokenizer.

    Args:
        base: a LLaMA's folder, or a Hugging Face id.
        delta: the delta's folder, or its id.
        out: the folder to create; one shard of each is in memory at a time.
        force: replace a checkpoint at ``out``.
        progress: called with a tensor's name, tensors done, and all.

    Raises:
        CheckpointError: one of them cannot be read, or the delta does not belong to the base.
        BuildError: ``out`` is taken or cannot be written.
    """
    target, places = Path(out), [resolve_checkpoint(one) for one in (base, delta)]
    _check_apart(target, places)
    with open_checkpoint(places[0]) as first, open_checkpoint(places[1]) as second:
        notes = check_pair(first, second)
        names = tensor_names(second)
        size = sum(_size(second.tensors[name]) for name in names)
        try:
            with new_parents(target), staged_folder(target, force=force, size=size, kind=_MERGED) as folder:
                files = _copy_files(places[1], folder)
                write_tensors(_counted(first, second, len(names), progress), folder)
                for shard in folder.glob("*.safetensors"):  # safetensors writes for the owner alone
                    shard.chmod((folder / INDEX).stat().st_mode)
        except (OSError, SafetensorError) as error:
            raise BuildError("cannot write the checkpoint", seen=error, fix="-o") from error
        if not has_tokenizer(files):
            notes.append("DELTA has no tokenizer; copy its files into the folder before a build")
        return Merge(target, len(names), added_rows(first, second), size, tuple(notes))


def _size(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _copy_files(delta: Path, folder: Path) -> list[str]:
    """Configs and tokenizer files; returns their names."""
    names = [name for name in small_files(list_files(delta)) if not name.endswith(".index.json")]
    for name in names:
        shutil.copyfile(delta / name, folder / name)
    return names


def _counted(
    base: Checkpoint, delta: Checkpoint, total: int, progress: Progress | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for done, (name, tensor) in enumerate(merged_tensors(base, delta)):
        if progress is not None:
            progress(name, done, total)
        yield name, tensor


def _check_apart(target: Path, places: list[Path]) -> None:
    """A folder that is read is never replaced."""
    for role, place in zip(("BASE", "DELTA"), places, strict=True):
        if place.resolve().is_relative_to(target.resolve()):
            raise BuildError(
                f"the target is {role} or holds it", seen=target, field="output", fix="`output=ANOTHER`"
            )
