"""Copies of the files of tokenizer and chat template as they were when a server started.

Every process of the server reads them, however often it starts: the model's folder may change meanwhile.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ingot.engine.manifest import TOKENIZER_FOLDER, Manifest, is_engine
from ingot.engine.proof_file import manifest_hash
from ingot.errors import EngineError

_AGAIN = "start the server again"


class TextFiles:
    """Copies from ``origin`` in ``folder``, which is deleted with this object. ``manifest``: sha256 of the
    engine's manifest.json; None of a checkpoint.

    Args:
        folder: an engine's or a checkpoint's.
        files: of a checkpoint's tokenizer and template; an engine's manifest names its own.

    Raises:
        EngineError: a file has changed since the build, or there is no room for the copies.
    """

    def __init__(self, folder: Path, manifest: Manifest, files: Sequence[Path]) -> None:
        of_engine = is_engine(folder)
        self.origin = folder / TOKENIZER_FOLDER if of_engine else folder
        self.manifest = manifest_hash(folder) if of_engine else None
        self._kept = tempfile.TemporaryDirectory(prefix="ingot-text-")
        self.folder = Path(self._kept.name)
        chosen = [self.origin / name for name in manifest.files] if of_engine else files
        for file in chosen:
            try:
                copied = Path(shutil.copyfile(file, self.folder / file.name))
            except OSError as error:
                seen = f"{file}: {error.strerror or error}"
                raise EngineError("a file of the tokenizer cannot be copied", seen=seen, fix=_AGAIN) from None
            digest = hashlib.sha256(copied.read_bytes()).hexdigest()
            if of_engine and digest != manifest.files[file.name]:
                raise EngineError("a file has changed since the build", seen=file, fix=_AGAIN)


def check_manifest(folder: Path, expected: str | None) -> None:
    """Raises EngineError where manifest.json is not the one whose text the server has read; None: any."""
    if expected is not None and manifest_hash(folder) != expected:
        raise EngineError("the engine has changed since the server started", seen=folder, fix=_AGAIN)
