"""Tensors written as a Hugging Face checkpoint: shards, their index, and config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from ingot.checkpoint.checkpoint_files import CONFIG
from ingot.checkpoint.checkpoint_reader import GENERATION_CONFIG, Checkpoint

_SHARD_BYTES = 1 << 30
INDEX = "model.safetensors.index.json"


def write_checkpoint(source: Checkpoint, folder: Path) -> Path:
    """Write config and tensors of a checkpoint, under its names, to the new ``folder``; returns it.

    Of a GGUF file also the tokenizer and the ids that end a text.
    """
    folder.mkdir(parents=True)
    if source.text_folder != source.folder:
        shutil.copytree(source.text_folder, folder, dirs_exist_ok=True)
        (folder / GENERATION_CONFIG).write_text(json.dumps(source.generation_config), encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(source.config), encoding="utf-8")
    write_tensors(((name, source.read(name)) for name in source.tensors), folder)
    return folder


def write_tensors(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write tensors by name, in shards of which one is in memory at a time, and their index."""
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if shard:
            file = f"model-{len(set(places.values())) + 1:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places.update(dict.fromkeys(shard, file))
            shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.clone(memory_format=torch.contiguous_format)
        if sum(t.nbytes for t in shard.values()) >= _SHARD_BYTES:
            flush()
    flush()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
