"""A Hugging Face id made into a local folder, the cache before the network.

huggingface_hub reads HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN when it is imported.
"""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ingot.checkpoint.checkpoint_files import (
    CONFIG,
    find_layout,
    has_tokenizer,
    list_files,
    shorten,
    small_files,
)
from ingot.checkpoint.gguf.gguf_parts import SUFFIX, GgufId, models_of, only_gguf
from ingot.errors import CheckpointError, NoSuchPathError

_NOTHING = ("no file has this name",)  # a pattern: the snapshot whatever it holds
# The HTTP library's own base error, whichever library this release of huggingface_hub is built on, and
# OSError.
_NETWORK_ERRORS: tuple[type[Exception], ...] = (HfHubHTTPError.__bases__[0], OSError)


def resolve_id(
    name_or_path: str | Path, path: Path, revision: str | None, cache_dir: Path | None, offline: bool
) -> Path:
    """``resolve_checkpoint`` of what is not on this machine; ``path``: the name as a path."""
    if (files := gguf_id(name_or_path)) is not None:
        return _resolve_gguf(files, revision, cache_dir, offline)
    repo = _repo_id(name_or_path, path)
    cached = _cached(repo, revision, cache_dir)
    complete = cached if cached is not None and _incomplete(cached) is None else None
    if complete is not None and has_tokenizer(list_files(complete)):
        return complete
    if offline or constants.HF_HUB_OFFLINE:
        gguf = _cached_gguf(GgufId(repo), _cached(repo, revision, cache_dir, _NOTHING))
        return complete or gguf or _refuse_offline(repo, revision, cached)
    try:
        return _download(repo, revision, cache_dir)
    except CheckpointError:
        # All weights are here; whoever needs the tokenizer reports that it is missing.
        if complete is not None:
            return complete
        raise


def expect_id(name_or_path: str | Path, path: Path, revision: str | None, offline: bool) -> None:
    """``expect_checkpoint`` of what is not on this machine; ``path``: the name as a path."""
    files = gguf_id(name_or_path)
    repo = _repo_id(name_or_path, path) if files is None else files.repo
    if _cached(repo, revision, None, _NOTHING) is not None:
        return  # complete or not
    if offline or constants.HF_HUB_OFFLINE:
        resolve_id(name_or_path, path, revision, None, offline)
    try:
        HfApi().model_info(repo, revision=revision)
    except _NETWORK_ERRORS as error:
        raise _explain(repo, revision, error) from error


def resolve_id_config(name_or_path: str | Path, path: Path, revision: str | None) -> Path:
    """``resolve_config`` of what is not on this machine; ``path``: the name as a path."""
    if (files := gguf_id(name_or_path)) is not None:
        return _resolve_gguf(files, revision, None, offline=True)
    repo = _repo_id(name_or_path, path)
    cached = _cached(repo, revision, None)
    if cached is not None and CONFIG in list_files(cached):
        return cached
    if constants.HF_HUB_OFFLINE:
        return _refuse_offline(repo, revision, None)
    try:
        return _fetch(repo, revision, None, [CONFIG])
    except _NETWORK_ERRORS as error:
        raise _explain(repo, revision, error) from error


def gguf_id(name: str | Path) -> GgufId | None:
    """Files on the hub; None for a path, where its first folder is here, and for no repository's name."""
    found = GgufId.of(name) if isinstance(name, str) else None
    if found is None or Path(found.repo).parent.exists():
        return None
    with suppress(HFValidationError):
        validate_repo_id(found.repo)
        return found
    return None


def _resolve_gguf(wanted: GgufId, revision: str | None, cache_dir: Path | None, offline: bool) -> Path:
    """The first file of a GGUF model, from the cache or the network."""
    cached = _cached(wanted.repo, revision, cache_dir, _NOTHING)
    if (found := _cached_gguf(wanted, cached)) is not None:
        return found
    if offline or constants.HF_HUB_OFFLINE:
        here = [] if cached is None else _ggufs_in(cached)
        raise CheckpointError(
            f"{wanted.text} is not in the local cache, and it may not be downloaded",
            seen=shorten(here) if here else None,
            fix="unset HF_HUB_OFFLINE; `ingot plan` downloads no weights: `ingot build` it first",
        )
    try:
        return _download_gguf(wanted, revision, cache_dir, _names(wanted.repo, revision))
    except _NETWORK_ERRORS as error:
        raise _explain(wanted.repo, revision, error) from error


def _cached_gguf(wanted: GgufId, folder: Path | None) -> Path | None:
    """The first of a model's files in a snapshot; None where one is missing."""
    files = None if folder is None else wanted.chosen(_ggufs_in(folder))
    if folder is None or files is None or not all((folder / name).is_file() for name in files):
        return None
    return folder / files[0]


def _ggufs_in(folder: Path) -> list[str]:
    """Names of the GGUF files in a snapshot and its folders."""
    found = (path for path in folder.rglob(f"*{SUFFIX}") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _download_gguf(
    wanted: GgufId, revision: str | None, cache_dir: Path | None, names: Iterable[str]
) -> Path:
    """Download a model's GGUF files, which are among the repository's ``names``; the first one's path."""
    known = [name for name in names if ".." not in name.split("/") and not name.startswith("/")]
    files = wanted.chosen(known)
    absent = [name for name in files or () if name not in known]
    if absent:
        what = f"parts of {wanted.text} are missing on the hub"
        raise CheckpointError(what, seen=shorten(absent), fix="another file or revision of the repository")
    if files is None:
        raise CheckpointError(
            f"{wanted.text} does not name one GGUF model of the repository",
            seen=wanted.kind or wanted.file or "no file",
            allowed=shorten([one[0] for one in models_of(known)], 24),
            fix=f"{wanted.repo}:TYPE, such as {wanted.repo}:Q4_K_M, or {wanted.repo}/FILE.gguf",
        )
    return _fetch(wanted.repo, revision, cache_dir, files) / files[0]


def _repo_id(name: str | Path, path: Path) -> str:
    if path.parent != Path() and not path.is_absolute() and path.parent.is_dir():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()])
        raise NoSuchPathError("no such folder", seen=path, allowed=near or None, fix="correct the path")
    text = str(name)
    with suppress(HFValidationError):
        validate_repo_id(text)
        if not text.startswith(("/", ".", "~")) and not isinstance(name, Path):
            return text
    raise NoSuchPathError(
        "neither an existing folder nor a Hugging Face id",
        seen=text,
        allowed="the path of a checkpoint folder, or org/name",
        fix="correct the path or the id",
    )


def _cached(
    repo: str, revision: str | None, cache_dir: Path | None, wanted: Sequence[str] = (CONFIG,)
) -> Path | None:
    """The snapshot in the cache, complete or not; None where there is none."""
    try:
        # With one pattern: the cache may know of files, such as code, that were never wanted.
        found = snapshot_download(
            repo, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=list(wanted)
        )
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def _incomplete(folder: Path) -> CheckpointError | None:
    """What a snapshot lacks to be a checkpoint."""
    names = list_files(folder)
    if CONFIG not in names:
        return CheckpointError(f"{folder} has no {CONFIG}")
    try:
        find_layout(folder, names)
    except CheckpointError as error:
        return error
    return None


def _at(repo: str, revision: str | None) -> str:
    return f"{repo} at revision {revision}" if revision else repo


def _refuse_offline(repo: str, revision: str | None, cached: Path | None) -> NoReturn:
    fix = "unset HF_HUB_OFFLINE and leave out the offline flag, or give a local path"
    lack = _incomplete(cached) if cached is not None else None
    if lack is None:
        what = f"{_at(repo, revision)} is not in the local cache, and the network is off"
        raise CheckpointError(what, fix=fix)
    what = f"{_at(repo, revision)} is incomplete in the local cache, and the network is off: {lack.what}"
    raise CheckpointError(what, seen=lack.seen, fix=fix)


def _download(repo: str, revision: str | None, cache_dir: Path | None) -> Path:
    try:
        names = _names(repo, revision)
        if only_gguf(names):
            return _download_gguf(GgufId(repo), revision, cache_dir, names)
        small = small_files(names)
        if CONFIG not in small:
            raise CheckpointError(
                f"{_at(repo, revision)} has no {CONFIG}", fix="choose a Transformers checkpoint"
            )
        folder = _fetch(repo, revision, cache_dir, small)
        weights = find_layout(folder, [name for name in names if "/" not in name]).files
        folder = _fetch(repo, revision, cache_dir, [*small, *weights])
    except _NETWORK_ERRORS as error:
        raise _explain(repo, revision, error) from error
    lack = _incomplete(folder)
    if lack is not None:
        raise lack
    return folder


def _names(repo: str, revision: str | None) -> list[str]:
    """Of a repository's files."""
    return [file.rfilename for file in HfApi().model_info(repo, revision=revision).siblings or []]


def _fetch(repo: str, revision: str | None, cache_dir: Path | None, names: list[str]) -> Path:
    exact = [glob.escape(name) for name in names]
    return Path(snapshot_download(repo, revision=revision, cache_dir=cache_dir, allow_patterns=exact))


def _explain(repo: str, revision: str | None, error: Exception) -> CheckpointError:
    """The one thing to do about an error of the hub."""
    detail = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if isinstance(error, GatedRepoError):
        fix = "accept its terms on huggingface.co, then run `hf auth login` or set HF_TOKEN"
        return CheckpointError(f"{repo} is gated, and you have no access to it", fix=fix)
    if isinstance(error, RepositoryNotFoundError):
        fix = "correct the id, give a local path, or log in with `hf auth login` if it is private"
        return CheckpointError("no such model on the hub", seen=repo, fix=fix)
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{repo} has no such revision", seen=revision, field="revision")
    return CheckpointError(
        f"cannot download {_at(repo, revision)}, and there is no such local folder",
        seen=detail,
        fix="correct the path if you meant a folder; otherwise check the network and the disk "
        "(HF_HUB_OFFLINE=1 uses only the cache)",
    )
