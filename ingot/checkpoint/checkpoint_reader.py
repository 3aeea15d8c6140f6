"""A checkpoint, read one tensor at a time: host memory stays near one shard."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from ingot.checkpoint.checkpoint_files import (
    CONFIG,
    EXPECTED,
    Layout,
    find_layout,
    list_files,
    read_json,
    shorten,
)
from ingot.checkpoint.fp8_weights import Fp8Weights, scale_names
from ingot.checkpoint.gguf.gguf_config import config_of as gguf_config
from ingot.checkpoint.gguf.gguf_config import generation_of as gguf_generation
from ingot.checkpoint.gguf.gguf_file import GgufFile, gguf_at, is_gguf
from ingot.checkpoint.gguf.gguf_tokenizer import TokenizerFiles
from ingot.checkpoint.gguf.gguf_weights import GgufWeights
from ingot.checkpoint.minigpt4_files import MiniGPT4Files, is_minigpt4
from ingot.checkpoint.minigpt4_files import config_of as minigpt4_config
from ingot.checkpoint.openai_whisper import STATE, config_of, generation_of, is_openai, names_of
from ingot.checkpoint.packed_config import packed_files, packed_format
from ingot.checkpoint.packed_tensors import PackedLayers
from ingot.checkpoint.shard_reader import OpenShard, TensorInfo, read_values, scan_shard
from ingot.config.build_config import MANIFEST_FILE
from ingot.errors import CheckpointError, NoSuchPathError

GENERATION_CONFIG = "generation_config.json"


class Checkpoint:
    """The tensors of a checkpoint and the configs beside them; made by ``open_checkpoint``.

    Attributes:
        folder: where the files are.
        path: the folder, or the GGUF file.
        alone: whether it is one file, whose configs are not beside it.
        config, generation_config: the JSON files as they are; {} where there is no generation config.
        tensors: name to shape, dtype and file, in the order of the files; packed layers by their weights.
        packed: the layers that are stored in fewer bits; None: there are none.
        fp8: the layers in fp8 that every build dequantizes; None: there are none.
        widened: by quantization type, how many tensors are dequantized in any build.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        tensors: dict[str, TensorInfo],
        inner: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
        *,
        alone: bool = False,
        shard: GgufWeights | None = None,
        text: TokenizerFiles | None = None,
    ) -> None:
        self.folder = self.path = folder
        self.alone = alone
        self.config = config
        self.generation_config = generation_config
        self.tensors = tensors
        self.packed: PackedLayers | None = None
        self.fp8: Fp8Weights | None = None
        self._stored = tensors
        self._inner = inner or {}
        self._names = names or {}
        self.widened: dict[str, int] = {}
        self._shard = shard
        self._text = text
        self._open = OpenShard()
        self._closed = False

    @property
    def text_folder(self) -> Path:
        """Where the tokenizer's files are, until ``close``; CheckpointError where a GGUF file's cannot be
        read.
        """
        return self.folder if self._text is None else self._text.folder()

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor ``name``, on the CPU, of the stored shape and dtype; no other tensor shares its storage.

        It may be a private mapping of the file: writing to it changes no file. One file is open at a time,
        so reading in the order of ``tensors`` opens each once. A packed weight is dequantized.

        ``dtype`` is what the caller will cast to: a GGUF file's tensor that is dequantized may then come in
        it, so that its fp32 values are never all in memory; others, and one with a value that overflows, come
        as they are. Raises CheckpointError for an unknown name, NaN or infinity, a damaged file or a closed
        checkpoint.
        """
        if self.packed is not None and name in self.packed:
            return self.packed.weight(name).dequantized(self.tensors[name].dtype)
        if self.fp8 is not None and name in self.fp8.names:
            return self.fp8.read(name)
        return self.read_stored(name, dtype)

    def read_stored(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``read`` of a tensor as it is stored, the pieces of packed layers included."""
        if self._closed:
            raise CheckpointError(
                f"the checkpoint {self.folder} is closed", seen=name, fix="read before close"
            )
        info = self._stored.get(name)
        if info is None:
            near = difflib.get_close_matches(name, self.tensors, n=3)
            raise CheckpointError(
                f"no such tensor in {self.folder}", seen=name, allowed=shorten(near or list(self.tensors))
            )
        file = self.folder / info.file
        if self._shard is not None:
            tensor = self._shard.read(name, dtype)
        else:
            tensor = self._open.read(file, self._inner.get(info.file), self._names.get(name, name))
        if tensor.is_floating_point() and tensor.numel():
            values = tensor.half() if tensor.itemsize == 1 else tensor  # fp8 has no order of its own in torch
            # One pass at the speed of memory: NaN and infinity are, or become, the least or the most.
            if not all(math.isfinite(float(value)) for value in torch.aminmax(values)):
                nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
                raise CheckpointError(
                    f"{name} has values that are not finite",
                    seen=f"{nan} NaN and {infinite} infinite of {values.numel()}, in {file}",
                    fix="download the file again; if training produced them, use an earlier checkpoint",
                )
        return tensor

    def rename(self, names: Mapping[str, str]) -> None:
        """Know stored tensors by other names: own name → name."""
        self._stored = self.tensors = {names.get(own, own): info for own, info in self.tensors.items()}
        self._names = {name: own for own, name in names.items()}

    def close(self) -> None:
        self._open.close()
        if self._text is not None:
            self._text.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(folder: Path | MiniGPT4Files) -> Checkpoint:
    """Open a Hugging Face checkpoint folder, a GGUF file (any part of it, or its folder), a ``.pt`` file of
    OpenAI's Whisper, or the files of a MiniGPT-4 (or the YAML file that names them); reads what the files
    hold, not the tensors.

    Layouts of a folder, in order of preference: ``model.safetensors``; ``model.safetensors.index.json`` with
    shards; one other ``*.safetensors``; ``pytorch_model.bin``; ``pytorch_model.bin.index.json`` with shards.
    With an index, the tensors are those that it names.

    Raises CheckpointError where there is no checkpoint, a file is damaged, shards or tensors of an index are
    missing, a pickle holds code, or a dtype or quantization format is not supported.
    """
    if isinstance(folder, MiniGPT4Files):
        return _open_minigpt4(folder)
    folder = Path(folder)
    if is_openai(folder):
        # Under the names and with the configs that Hugging Face's would have.
        config = config_of(folder, read_values(folder))
        stored = scan_shard(folder, STATE)
        names = names_of(stored)
        tensors = {name: stored[own] for name, own in names.items()}
        generation = generation_of(folder, config)
        return Checkpoint(folder.parent, config, generation, tensors, {folder.name: STATE}, names, alone=True)
    if is_minigpt4(folder):
        return _open_minigpt4(MiniGPT4Files.read(folder))
    if (gguf := gguf_at(folder)) is not None:
        return _open_gguf(gguf)
    files = list_files(folder)
    if CONFIG not in files:
        what = f"{folder} is not a checkpoint: it has no {CONFIG}", "give the folder that holds config.json"
        if MANIFEST_FILE in files:
            what = f"{folder} is an engine, not a checkpoint", "give the checkpoint that it was built from"
        allowed = f"{CONFIG} beside {' or '.join(EXPECTED)}"
        raise NoSuchPathError(what[0], seen=shorten(files), allowed=allowed, fix=what[1])
    config = read_json(folder / CONFIG)
    generation = read_json(folder / GENERATION_CONFIG) if GENERATION_CONFIG in files else {}
    found = Checkpoint(folder, config, generation, _scan(folder, find_layout(folder, files)))
    form = packed_format(config, packed_files(folder, files))
    if form is not None and form.source == "fp8":
        found.rename(scale_names(found.tensors))
    if form is not None and not form.kept:
        found.fp8 = Fp8Weights(form, found.tensors, found.read_stored)
        found.tensors, found.widened = found.fp8.tensors, {"fp8": len(found.fp8.names)}
    elif form is not None:
        found.packed = PackedLayers.of(form, found.tensors, found.read_stored)
        found.tensors = found.packed.tensors
    return found


def read_config(place: Path | MiniGPT4Files) -> dict[str, Any]:
    """A model's config.json, in a folder or as a ``.pt`` or YAML file has it; NoSuchPathError for none."""
    if isinstance(place, MiniGPT4Files) or is_minigpt4(place):
        with open_checkpoint(place) as found:
            return found.config
    if is_openai(place):
        return config_of(place, read_values(place))
    if (gguf := gguf_at(place)) is not None:
        return gguf_config(GgufFile.open(gguf))
    file = place / CONFIG if place.is_dir() else place
    if not file.is_file():
        raise NoSuchPathError("no such config", seen=file, fix="a config.json, or a folder with one")
    return read_json(file)


def _open_gguf(path: Path) -> Checkpoint:
    """Tensors, configs and tokenizer of a GGUF file, as Hugging Face's would be."""
    file = GgufFile.open(path)
    config, generation = gguf_config(file), gguf_generation(file)
    weights, text = GgufWeights(file, config), TokenizerFiles(file)
    found = Checkpoint(path.parent, config, generation, weights.infos(), alone=True, shard=weights, text=text)
    found.path, found.widened = path, weights.widened
    if weights.form is not None:
        found.packed = PackedLayers.of(weights.form, found.tensors, found.read_stored)
        found.tensors = found.packed.tensors
    return found


def _open_minigpt4(files: MiniGPT4Files) -> Checkpoint:
    """The LLM's tensors under their own names, those of the other files behind the names of their parts."""
    llm = open_checkpoint(files.llm)
    if llm.packed is not None or llm.widened or is_gguf(llm.path):
        seen, fix = files.llm, "the LLM in 16 bits; `quant` quantizes it"
        raise CheckpointError("MiniGPT-4's LLM is quantized already", seen=seen, fix=fix)
    tensors, inner, names = dict(llm.tensors), {}, {}
    for part, (file, key) in files.parts.items():
        place = str(file.resolve())
        for name, info in scan_shard(file, key).items():
            tensors[f"{part}.{name}"] = replace(info, file=place)
            names[f"{part}.{name}"] = name
        if key is not None:
            inner[place] = key
    config = minigpt4_config(files, llm.config, tensors)
    generation = llm.generation_config | {"chat_format": files.chat_format}
    return Checkpoint(files.llm, config, generation, tensors, inner, names)


def _scan(folder: Path, layout: Layout) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    absent: list[str] = []
    for file in layout.files:
        infos = scan_shard(folder / file)
        if layout.index is not None:
            wanted = [name for name, where in layout.index.items() if where == file]
            absent += [f"{name} ({file})" for name in wanted if name not in infos]
            infos = {name: infos[name] for name in wanted if name in infos}
        tensors.update(infos)
    if absent:
        raise CheckpointError(
            f"the index of {folder} names {len(absent)} tensors that their shards do not hold",
            seen=shorten(absent),
            fix="download the index and the shards again, all of one revision",
        )
    return tensors
