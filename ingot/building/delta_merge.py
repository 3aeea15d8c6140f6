"""A delta merged with its base: a checkpoint folder that appears whole or not at all."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from ingot.checkpoint.checkpoint_files import CONFIG, has_tokenizer, list_files, small_files
from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.checkpoint_writer import INDEX, write_tensors
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.checkpoint.weight_delta import added_rows, check_pair, merged_tensors, tensor_names
from ingot.engine.staging import FolderKind, new_parents, staged_folder
from ingot.errors import BuildError

Progress = Callable[[str, int, int], None]
_MERGED = FolderKind(
    "checkpoint", "a checkpoint", lambda path: (path / CONFIG).is_file() and (path / INDEX).is_file()
)


@dataclass(frozen=True)
class Merge:
    """What was written: a checkpoint of so many ``tensors`` and ``size`` bytes.

    ``added_rows``: tokens that the delta has beyond the base's; ``notes``: what the pair's check left open.
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
        base, delta: a LLaMA's folder or a Hugging Face id, and the delta's.
        out: the folder to create; one shard of each is in memory at a time.
        force: replace a checkpoint at ``out``.
        progress: called with a tensor's name, tensors done, and all.

    Raises:
        CheckpointError: one of them cannot be read, or the delta does not belong to the base.
        BuildError: ``out`` is taken or cannot be written.
    """
    target, places = Path(out), [resolve_checkpoint(one) for one in (base, delta)]
    for role, place in zip(("BASE", "DELTA"), places, strict=True):  # a folder that is read is never replaced
        if place.resolve().is_relative_to(target.resolve()):
            what, fix = f"the target is {role} or holds it", "`output=ANOTHER`"
            raise BuildError(what, seen=target, field="output", fix=fix)
    with open_checkpoint(places[0]) as first, open_checkpoint(places[1]) as second:
        notes = check_pair(first, second)
        names = tensor_names(second)
        infos = [second.tensors[name] for name in names]
        size = sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)
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


def _copy_files(delta: Path, folder: Path) -> list[str]:
    """Copy configs and tokenizer files; returns their names."""
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
