"""Whether an engine's files are still those that were built.

Owns the comparison of files and tensors with the hashes in the manifest. Knows nothing of what they mean.

    check_files(folder, manifest)
    with TensorHashes(manifest) as hashes:
        for name, tensor in tensors: hashes.add(name, tensor)      # hashed beside the loading
    find_damage(folder, manifest)                                  # all of it, for `ingot verify`
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from ingot.engine.manifest import TOKENIZER_FOLDER, WEIGHTS_FILE, Manifest
from ingot.engine.weights_file import tensor_bytes
from ingot.errors import EngineError

_MOST_THREADS = 8


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
                "the weights are not those that were built: their hashes differ",
                seen=f"{len(damaged)} of {len(self._found)} tensors: {', '.join(damaged[:5])}",
                fix="build the engine again",
            )


def tensor_hash(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's bytes, as the manifest has it."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def check_files(folder: Path, manifest: Manifest) -> None:
    """The tokenizer's files must be those that the build wrote: a cut vocabulary would read as a smaller one.

    Raises:
        EngineError: one is missing or differs.
    """
    for name, digest in manifest.files.items():
        path = folder / TOKENIZER_FOLDER / name
        if not _is_file(path, digest):
            raise EngineError(
                "a tokenizer file is missing or not the one that was built",
                seen=path,
                fix="build the engine again",
            )


def check_engine(folder: Path, manifest: Manifest) -> None:
    """Read every file of an engine and compare its hash with the manifest's.

    Raises:
        EngineError: a file or tensor differs, or cannot be read.
    """
    check_files(folder, manifest)
    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file, TensorHashes(manifest) as hashes:
            for name in manifest.tensors:
                hashes.add(name, file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise EngineError(
            f"{WEIGHTS_FILE} cannot be read", seen=f"{path}: {error}", fix="build the engine again"
        ) from None


@dataclass(frozen=True)
class Damage:
    """A file of an engine, or a tensor in it, that is not what was built."""

    file: str
    tensor: str | None
    what: str


def find_damage(folder: Path, manifest: Manifest) -> list[Damage]:
    """Everything in an engine folder that differs from its manifest, by hash; reads all of it, runs
    nothing."""
    found = [
        Damage(f"{TOKENIZER_FOLDER}/{name}", None, "is missing or not the one that was built")
        for name, digest in manifest.files.items()
        if not _is_file(folder / TOKENIZER_FOLDER / name, digest)
    ]
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
                    found.append(
                        Damage(WEIGHTS_FILE, name, "is not the one that was built: its hash differs")
                    )
        extra = sorted(stored - set(manifest.tensors))
        found += [Damage(WEIGHTS_FILE, name, "is not in the manifest") for name in extra]
    except (SafetensorError, OSError) as error:
        found.append(Damage(WEIGHTS_FILE, None, f"cannot be read: {error}"))
    return found


def _is_file(path: Path, digest: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)
