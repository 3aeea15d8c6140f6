"""Which files of a folder hold the weights and the text side, and which of its links may be followed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config.files.json_text import JsonError, load_json
from ingot.errors import CheckpointError, NoSuchPathError

CONFIG = "config.json"
TEMPLATES = "additional_chat_templates"  # a folder
SINGLE_AND_INDEX = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
EXPECTED = (
    "model.safetensors",
    "model.safetensors.index.json with its shards",
    "one *.safetensors file",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json with its shards",
)
_SMALL_SUFFIXES = (".json", ".jinja", ".tiktoken", ".model", ".bpe")
_SMALL_NAMES = ("merges.txt", "vocab.txt", f"{TEMPLATES}/tool_use.jinja")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.bpe")
_SHARD = re.compile(r"-\d+-of-\d+\.(safetensors|bin)$")


@dataclass(frozen=True)
class Layout:
    """Weight files by name, in the order to read; ``index``: files by tensor, None where there is but one."""

    files: tuple[str, ...]
    index: dict[str, str] | None = None


def list_files(folder: Path) -> list[str]:
    """Names of the files in ``folder``, sorted; links whose target is gone are left out.

    Raises CheckpointError where it is no readable folder, or a link in a checkpoint leads outside it.
    """
    if not folder.exists():
        raise NoSuchPathError(
            "the checkpoint folder does not exist", seen=folder, fix="give the path of a folder"
        )
    if not folder.is_dir():
        fix = f"give its folder, {folder.parent}"
        raise NoSuchPathError("a checkpoint is a folder, but this is a file", seen=folder, fix=fix)
    try:
        paths = sorted(folder.iterdir())
        names = [path.name for path in paths if path.is_file()]
        paths += sorted((folder / TEMPLATES).glob("*"))
        outside = [f"{path.name} -> {path.readlink()}" for path in paths if leads_outside(folder, path)]
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}", seen=error, fix="check its permissions") from error
    if outside and CONFIG in names:  # without a config, open_checkpoint says that it is no checkpoint
        raise CheckpointError(
            f"links in {folder} lead outside it",
            seen=shorten(outside),
            allowed="files, links within the folder, and the Hugging Face cache's own links",
            fix="replace the links with the files themselves",
        )
    return names


def leads_outside(folder: Path, path: Path) -> bool:
    """Whether ``path``, in ``folder`` or a folder in it, is a link to a place outside ``folder``.

    The cache of huggingface_hub is made of links that may be followed: from ``snapshots/<revision>`` to
    ``blobs/<hash>`` of the same repository. A link whose target is gone leads nowhere.
    """
    if not path.is_symlink() or not path.exists():
        return False
    home, target = folder.resolve(), path.resolve()
    if home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs":
        return False
    return not target.is_relative_to(home)


def find_layout(folder: Path, names: Collection[str]) -> Layout:
    """Choose the weight files among ``names``; safetensors before ``.bin``, one file before shards.

    ``names`` may be those of a repository before its weights are downloaded; an index is read in ``folder``.
    Raises CheckpointError for no known layout, an index that cannot be read, or missing shards.
    """
    safetensors, torch_files = SINGLE_AND_INDEX
    found = _named(folder, names, *safetensors)
    if found is None:
        lone = [name for name in names if name.endswith(".safetensors") and not _SHARD.search(name)]
        lone = [name for name in lone if not name.startswith("adapter_")]
        found = Layout((lone[0],)) if len(lone) == 1 else _named(folder, names, *torch_files)
    if found is None:
        shards = any(_SHARD.search(name) for name in names)
        raise CheckpointError(
            f"no readable weights in {folder}",
            seen=shorten(sorted(names)),
            allowed=" or ".join(EXPECTED),
            fix="add the shards' index.json" if shards else "download or convert the weights",
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError where there is none."""
    try:
        data = load_json(path)
    except (OSError, JsonError) as error:
        raise CheckpointError(f"{path} is not readable JSON", seen=error, fix="download it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object", seen=type(data).__name__, allowed="object")
    return data


def shorten(names: Sequence[str], limit: int = 8) -> str:
    """The first ``limit`` names, then how many more there are."""
    if not names:
        return "nothing"
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _named(folder: Path, names: Collection[str], single: str, index: str) -> Layout | None:
    if single in names:
        return Layout((single,))
    if index not in names:
        return None
    path = folder / index
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map", seen=weight_map, fix="download it again")
    for name in weight_map.values():  # data from outside: it may name files beside it, and no others
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise CheckpointError(f"{path} names a shard outside its folder", seen=name, fix="correct it")
        if not name.endswith((".safetensors", ".bin")):
            raise CheckpointError(
                f"{path} names a shard of an unknown file type", seen=name, allowed="*.safetensors or *.bin"
            )
    files = tuple(sorted(set(weight_map.values())))
    missing = [name for name in files if name not in names]
    if missing:
        raise CheckpointError(
            f"shards named in {path} are missing ({len(missing)} of {len(files)})",
            seen=shorten(missing, limit=64),
            fix="download the missing files into the folder",
        )
    return Layout(files, dict(weight_map))


def small_files(names: Iterable[str]) -> list[str]:
    """The configs and tokenizer files at the top of a repository, and the chat template for tools."""
    return [n for n in names if ("/" not in n and n.endswith(_SMALL_SUFFIXES)) or n in _SMALL_NAMES]


def has_tokenizer(names: Iterable[str]) -> bool:
    return any(name in _TOKENIZERS or name.endswith(".tiktoken") for name in names)
