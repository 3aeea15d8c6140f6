"""Which files of a folder hold the weights.

Covers the file names of the known layouts, their order of preference and the index of a sharded checkpoint.
Does not know what is inside a weight file, nor where the folder came from.

    layout = find_layout(folder, list_files(folder))     # layout.files: the weight files to open
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.checkpoint.outside_links import leads_outside
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
_SHARD = re.compile(r"-\d+-of-\d+\.(safetensors|bin)$")


@dataclass(frozen=True)
class Layout:
    """The weight files of a checkpoint.

    Attributes:
        files: names in the folder, in the order to read them.
        index: tensor name to file name; None where there is a single file, which speaks for itself.
    """

    files: tuple[str, ...]
    index: dict[str, str] | None = None


def list_files(folder: Path) -> list[str]:
    """Names of the files in ``folder``, sorted; links whose target is gone are left out.

    Raises:
        CheckpointError: ``folder`` is missing, is no folder, or may not be read; a link in a checkpoint leads
            outside its folder.
    """
    if not folder.exists():
        raise NoSuchPathError(
            "the checkpoint folder does not exist", seen=folder, fix="give the path of a folder"
        )
    if not folder.is_dir():
        raise NoSuchPathError(
            "a checkpoint is a folder, but this is a file",
            seen=folder,
            fix=f"give its folder, {folder.parent}",
        )
    try:
        paths = sorted(folder.iterdir())
        names = [path.name for path in paths if path.is_file()]
        paths += sorted((folder / TEMPLATES).glob("*"))
        outside = [f"{path.name} -> {path.readlink()}" for path in paths if leads_outside(folder, path)]
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}", seen=error, fix="check its permissions") from error
    if outside and CONFIG in names:  # what is no checkpoint, its reader says
        raise CheckpointError(
            f"links in {folder} lead outside it",
            seen=shorten(outside),
            allowed="files, links within the folder, and the Hugging Face cache's own links",
            fix="replace the links with the files themselves",
        )
    return names


def find_layout(folder: Path, names: Collection[str]) -> Layout:
    """Choose the weight files among ``names``; safetensors before ``.bin``, one file before shards.

    Args:
        folder: where an index named in ``names`` can be read.
        names: files that the checkpoint has; those of a repository before its weights are downloaded, too.

    Raises:
        CheckpointError: no known layout, an index that cannot be read, or shards that are not in ``names``.
    """
    safetensors, torch_files = SINGLE_AND_INDEX
    found = _named(folder, names, *safetensors) or _lone_safetensors(names)
    found = found or _named(folder, names, *torch_files)
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
    """The object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, is no JSON, or holds something else than an object.
    """
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
    _check_plain(path, weight_map.values())
    files = tuple(sorted(set(weight_map.values())))
    missing = [name for name in files if name not in names]
    if missing:
        raise CheckpointError(
            f"shards named in {path} are missing ({len(missing)} of {len(files)})",
            seen=shorten(missing, limit=64),
            fix="download the missing files into the folder",
        )
    return Layout(files, dict(weight_map))


def _check_plain(index: Path, files: Iterable[object]) -> None:
    """An index is data from outside: it may name files beside it, and no others."""
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise CheckpointError(f"{index} names a shard outside its folder", seen=name, fix="correct it")
        if not name.endswith((".safetensors", ".bin")):
            raise CheckpointError(
                f"{index} names a shard of an unknown file type", seen=name, allowed="*.safetensors or *.bin"
            )


def _lone_safetensors(names: Collection[str]) -> Layout | None:
    lone = [name for name in names if name.endswith(".safetensors") and not _SHARD.search(name)]
    lone = [name for name in lone if not name.startswith("adapter_")]
    return Layout((lone[0],)) if len(lone) == 1 else None
