"""A model's name made into a local folder: one that is here, else one of Hugging Face's (hub_repos.py).

Only for the latter is Hugging Face's library imported, with its HTTP client: 150 modules. PyTorch is not.
"""

from __future__ import annotations

from pathlib import Path

from ingot.checkpoint.checkpoint_files import list_files
from ingot.checkpoint.gguf.gguf_file import gguf_at, is_gguf
from ingot.checkpoint.minigpt4_files import is_minigpt4
from ingot.checkpoint.openai_whisper import is_openai
from ingot.errors import NoSuchPathError


def local_path(name: str | Path) -> Path:
    """A name as a path; ``~user`` of a user that there is not stays as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def resolve_checkpoint(
    name_or_path: str | Path,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
) -> Path:
    """The folder of a checkpoint: a local one as it is, or a Hugging Face id from the cache or the network;
    a GGUF file, a ``.pt`` file of OpenAI's Whisper or the YAML file of a MiniGPT-4 as it is.

    ``org/name:Q4_K_M`` and ``org/name/file.gguf`` are GGUF files of a repository. Of a folder or repository
    with GGUF files and no other weights, the path is that of its only model's first file.

    A complete snapshot in the cache is taken without asking the network whether it is the newest; give a
    commit as ``revision`` to have another. Only config, tokenizer and weight files are downloaded, no code,
    and no ``.bin`` where there are safetensors.

    Args:
        revision: branch, tag or full commit; the main branch where None. Only for ids.
        cache_dir: cache to use in place of huggingface_hub's own.
        offline: never use the network; HF_HUB_OFFLINE=1 does the same.

    Raises:
        CheckpointError: neither a folder nor an id; no such model or revision; no access; not in the cache,
            or incomplete there, while offline; the network failed.
    """
    path = local_path(name_or_path)
    if _is_local(name_or_path, path):
        return gguf_at(path) or path
    from ingot.checkpoint.hub_repos import resolve_id

    return resolve_id(name_or_path, path, revision, cache_dir, offline)


def expect_checkpoint(name_or_path: str | Path, revision: str | None = None, offline: bool = False) -> None:
    """Refuse a name that is neither on this machine nor on the hub, as ``resolve_checkpoint`` does, but
    without PyTorch and without a download: a verb asks before it imports more.
    """
    path = local_path(name_or_path)
    if not _is_local(name_or_path, path):
        from ingot.checkpoint.hub_repos import expect_id

        expect_id(name_or_path, path, revision, offline)


def resolve_config(name_or_path: str | Path, revision: str | None = None) -> Path:
    """As ``resolve_checkpoint``, for a folder with config.json: of an id nothing else is downloaded. The
    config of a GGUF file is in the file, which must be in the cache.
    """
    path = local_path(name_or_path)
    if _is_local(name_or_path, path):
        return gguf_at(path) or path
    from ingot.checkpoint.hub_repos import resolve_id_config

    return resolve_id_config(name_or_path, path, revision)


def _is_local(name: str | Path, path: Path) -> bool:
    """Whether it is on this machine: a folder whose files can be listed, a GGUF file, a file of OpenAI's, or
    the YAML file of a MiniGPT-4. Raises CheckpointError for another file, and where such a file is missing.
    """
    if is_openai(path) or is_minigpt4(path) or is_gguf(path):
        if path.is_file():
            return True
        from ingot.checkpoint.hub_repos import gguf_id

        if gguf_id(name) is not None:
            return False
        raise NoSuchPathError("no such file", seen=path, fix="correct the path")
    if name == "" or not path.exists():
        return False
    list_files(path)
    return True
