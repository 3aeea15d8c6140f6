"""Whether an engine's files are still those that were built.

Covers the comparison of a folder, its files and tensors with what the manifest names, and of plan.json with
its own hash.

    check_files(folder, manifest)                                  # all but the weights
    with TensorHashes(manifest) as hashes:
        for name, tensor in tensors: hashes.add(name, tensor)      # hashed beside the loading
    find_damage(folder, manifest)                                  # all of it, for `ingot verify`
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from ingot.checkpoint.checkpoint_files import shorten
from ingot.checkpoint.outside_links import leads_outside
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


class TensorHashes:
    """Hashes tensors on threads of its own; leaving the block waits for them and raises for those that
    differ.

    Raises:
        EngineError: on leaving; it names the tensors whose bytes are not those that were built.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._expected = {name: entry.sha256 for name, entry in manifest.tensors.items()}
        self._pool = ThreadPoolExecutor(_threads())
        self._found: dict[str, Future[str]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to hash a CPU tensor; returns it."""
        self._found[name] = self._pool.submit(tensor_hash, tensor)
        return tensor

    def __enter__(self) -> TensorHashes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is not None:
            return
        damaged = [name for name, found in self._found.items() if found.result() != self._expected[name]]
        if damaged:
            raise EngineError(
                "the weights have changed since the build (hash mismatch)",
                seen=f"{len(damaged)} of {len(self._found)} tensors: {', '.join(damaged[:5])}",
                fix=REBUILD,
            )


def tensor_hash(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's bytes, as the manifest has it."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def check_files(folder: Path, manifest: Manifest) -> None:
    """The folder must hold what the manifest names and nothing else: a cut vocabulary would read as a smaller
    one, and a template that somebody added would be taken for the model's.

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


def check_header(path: Path, manifest: Manifest) -> None:
    """The weights file must begin with the header that its tensors have: no hash of theirs covers it.

    Raises:
        EngineError: it begins otherwise.
        OSError: the file cannot be read.
    """
    if not _has_header(path, manifest):
        raise EngineError(f"the header of {WEIGHTS_FILE} was changed", seen=path, fix=REBUILD)


def check_engine(folder: Path, manifest: Manifest) -> None:
    """Read every file of an engine and compare its hash with the manifest's.

    Raises:
        EngineError: a file or tensor differs, or cannot be read.
    """
    check_files(folder, manifest)
    path = folder / WEIGHTS_FILE
    with readable(path), safe_open(path, framework="pt") as file, TensorHashes(manifest) as hashes:
        check_header(path, manifest)
        for name in manifest.tensors:
            hashes.add(name, file.get_tensor(name))


@dataclass(frozen=True)
class Damage:
    """A file of an engine, or a tensor in it, that is not what was built."""

    file: str
    tensor: str | None
    what: str
    fix: str = REBUILD


def find_damage(folder: Path, manifest: Manifest) -> list[Damage]:
    """Everything in an engine folder that differs from its manifest, by hash; reads all of it, runs
    nothing."""
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
    """What is wrong with the files of a folder, but for the tensors."""
    texts = {f"{TOKENIZER_FOLDER}/{name}": digest for name, digest in manifest.files.items()}
    odd = set()
    for name, path in _entries(folder):
        if leads_outside(folder, path):
            yield Damage(name, None, "is a link that leads outside the engine", "replace links with files")
        elif name not in _OWN and name not in texts:
            yield Damage(
                _shown(name),
                None,
                "is not in the manifest",
                "move files that do not belong to the engine out of its folder",
            )
        elif not path.is_file():
            yield Damage(name, None, "is not a file")
        else:
            continue
        odd.add(name)
    for name, digest in texts.items():
        if name not in odd and not _is_file(folder / name, digest):
            yield Damage(name, None, "is missing or has changed since the build")
    plan = folder / PLAN_FILE
    if PLAN_FILE not in odd and plan.exists() and plan_data(plan) is None:
        yield Damage(PLAN_FILE, None, "was changed", plan_fix(folder))


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Everything in an engine folder by its name there, but what a process may be writing now."""
    for path in sorted(folder.iterdir()):
        if path.name == TOKENIZER_FOLDER and path.is_dir() and not leads_outside(folder, path):
            yield from ((f"{TOKENIZER_FOLDER}/{inner.name}", inner) for inner in sorted(path.iterdir()))
        elif not _UNFINISHED.fullmatch(path.name):
            yield path.name, path


def _shown(name: str) -> str:
    """A name that anybody may have chosen, without characters that steer a terminal."""
    return name if name.isprintable() else ascii(name)


def _has_header(path: Path, manifest: Manifest) -> bool:
    expected = header_bytes(manifest.tensors)
    with path.open("rb") as file:
        return file.read(len(expected)) == expected


def _is_file(path: Path, digest: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)
