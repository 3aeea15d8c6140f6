"""Whether an engine's files and tensors are still those that were built, by hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ingot.checkpoint.checkpoint_files import leads_outside, shorten
from ingot.control_groups import usable_processors
from ingot.engine.manifest import (
    MANIFEST_FILE,
    NOTE_FILE,
    PLAN_FILE,
    PROOF_FILE,
    REBUILD,
    TOKENIZER_FOLDER,
    WEIGHTS_FILE,
    Manifest,
)
from ingot.engine.plan_file import plan_data, plan_fix
from ingot.engine.weights_file import header_bytes, readable, tensor_bytes
from ingot.errors import EngineError

_MOST_THREADS = 8
_OWN = (MANIFEST_FILE, WEIGHTS_FILE, PLAN_FILE, PROOF_FILE, NOTE_FILE)
_UNFINISHED = re.compile(r"\.(plan|proof|verify)\.json-\d+")  # not yet renamed to its place; nobody reads it


@contextmanager
def checked_weights(
    folder: Path, manifest: Manifest, expected: Mapping[str, tuple[int, ...]] | None = None
) -> Iterator[Callable[[str], torch.Tensor]]:
    """A block that reads an engine's weights; gives a function from a tensor's name to the tensor on the CPU.

    Tensors are hashed on other threads meanwhile; leaving the block waits for them.

    Args:
        expected: shapes of the model's tensors.

    Raises:
        EngineError: the file cannot be read; the tensors of file, manifest and model differ; on leaving, the
            names of tensors with another hash.
    """
    path = folder / WEIGHTS_FILE
    hashes: dict[str, Future[str]] = {}
    with readable(path), safe_open(path, framework="pt") as file, ThreadPoolExecutor(_threads()) as pool:
        listed = {name: (entry.dtype, tuple(entry.shape)) for name, entry in manifest.tensors.items()}
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        odd = {name for name, _ in found.items() ^ listed.items()}
        if expected is not None:
            shapes = {name: shape for name, (_, shape) in listed.items()}
            odd |= {name for name, _ in expected.items() ^ shapes.items()}
        if odd:
            seen = f"{path}: {sorted(odd)[:5]}"
            raise EngineError("the weights do not match the manifest", seen=seen, fix=REBUILD)
        if not _has_header(path, manifest):
            raise EngineError(f"the header of {WEIGHTS_FILE} was changed", seen=path, fix=REBUILD)

        def read(name: str) -> torch.Tensor:
            tensor: torch.Tensor = file.get_tensor(name)
            hashes[name] = pool.submit(tensor_hash, tensor)
            return tensor

        try:
            yield read
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        damaged = [name for name, own in hashes.items() if own.result() != manifest.tensors[name].sha256]
        if damaged:
            raise EngineError(
                "the weights have changed since the build (hash mismatch)",
                seen=f"{len(damaged)} of {len(hashes)} tensors: {', '.join(damaged[:5])}",
                fix=REBUILD,
            )


def tensor_hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def check_files(folder: Path, manifest: Manifest) -> None:
    """The folder must hold exactly what the manifest names: a cut vocabulary would read as a smaller one, and
    an added template would be taken for the model's.

    Raises:
        EngineError: it names every file that is missing, changed or added, or leads outside the folder.
    """
    found = list(_file_damage(folder, manifest))
    if found:
        raise EngineError(
            f"the engine in {folder} has changed since the build",
            seen=shorten([f"{damage.file} {damage.what}" for damage in found]),
            fix="; ".join(dict.fromkeys(damage.fix for damage in found)),
        )


def check_engine(folder: Path, manifest: Manifest) -> None:
    """Read every file of an engine and compare its hash with the manifest's.

    Raises:
        EngineError: a file or tensor differs, or cannot be read.
    """
    check_files(folder, manifest)
    with checked_weights(folder, manifest) as read:
        for name in manifest.tensors:
            read(name)


@dataclass(frozen=True)
class Damage:
    """A file of an engine, or a tensor in it, that is not what was built."""

    file: str
    tensor: str | None
    what: str
    fix: str = REBUILD


def find_damage(folder: Path, manifest: Manifest) -> list[Damage]:
    """Everything in an engine folder that differs from its manifest, by hash; reads all files."""
    found = list(_file_damage(folder, manifest))
    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file, ThreadPoolExecutor(_threads()) as pool:
            stored = set(file.keys())
            hashes = {
                name: pool.submit(tensor_hash, file.get_tensor(name))
                for name in manifest.tensors
                if name in stored
            }
            for name, entry in manifest.tensors.items():
                if name not in hashes:
                    found.append(Damage(WEIGHTS_FILE, name, "is missing"))
                elif hashes[name].result() != entry.sha256:
                    found.append(Damage(WEIGHTS_FILE, name, "has changed since the build (hash mismatch)"))
        extra = sorted(stored - set(manifest.tensors))
        found += [Damage(WEIGHTS_FILE, name, "is not in the manifest") for name in extra]
        if stored == set(manifest.tensors) and not _has_header(path, manifest):
            found.append(Damage(WEIGHTS_FILE, None, "has a modified header"))
    except (SafetensorError, OSError) as error:
        found.append(Damage(WEIGHTS_FILE, None, f"cannot be read: {error}"))
    return found


def _file_damage(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    """What is wrong with the files of a folder, except for the tensors."""
    texts = {f"{TOKENIZER_FOLDER}/{name}": digest for name, digest in manifest.files.items()}
    odd = set()
    for name, path in _entries(folder):
        if leads_outside(folder, path):
            yield Damage(name, None, "is a link that leads outside the engine", "replace links with files")
        elif name not in _OWN and name not in texts:
            shown = name if name.isprintable() else ascii(name)  # anybody may have chosen it
            fix = "move files that do not belong to the engine out of its folder"
            yield Damage(shown, None, "is not in the manifest", fix)
        elif not path.is_file():
            yield Damage(name, None, "is not a file")
        else:
            continue
        odd.add(name)
    for name, digest in texts.items():
        path = folder / name
        if name in odd:
            continue
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            yield Damage(name, None, "is missing or has changed since the build")
    plan = folder / PLAN_FILE
    if PLAN_FILE not in odd and plan.exists() and plan_data(plan) is None:
        yield Damage(PLAN_FILE, None, "was changed", plan_fix(folder))


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Everything in an engine folder by name, except files that a process may be writing."""
    for path in sorted(folder.iterdir()):
        if path.name == TOKENIZER_FOLDER and path.is_dir() and not leads_outside(folder, path):
            yield from ((f"{TOKENIZER_FOLDER}/{inner.name}", inner) for inner in sorted(path.iterdir()))
        elif not _UNFINISHED.fullmatch(path.name):
            yield path.name, path


def _has_header(path: Path, manifest: Manifest) -> bool:
    expected = header_bytes(manifest.tensors)
    with path.open("rb") as file:
        return file.read(len(expected)) == expected


def _threads() -> int:
    return min(_MOST_THREADS, usable_processors())
