"""The tensors of a checkpoint, put together by published names: what an engine is compared with.

They take neither the weight maps of ``models/`` nor the packed layers of ``checkpoint/packed_tensors.py``, by
which builds read, and share with them only the opening of files, tensor by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self

import torch

from ingot.building.source.source_names import OPENAI, PREFIXES, TABLES, StackedModules, made_of
from ingot.building.source.source_packed import ENDS, Packing, meant
from ingot.checkpoint.checkpoint_files import find_layout, list_files, shorten
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.checkpoint.openai_whisper import STATE, is_openai
from ingot.checkpoint.shard_reader import OpenShard, TensorInfo, scan_shard
from ingot.config.decoder_config import DecoderConfig
from ingot.config.quantization.quant_config import HEAD
from ingot.engine.assembly import Assembly
from ingot.errors import CheckpointError


class Source(Protocol):
    """A checkpoint's tensors by our modules' names."""

    def read(self, module: str, leaf: str) -> torch.Tensor:
        """What one of our tensors holds before any rounding, on the CPU."""
        ...

    def is_packed(self, module: str) -> bool:
        """Whether a module's weight came in fewer bits."""
        ...

    def input_scale(self, module: str) -> float | None:
        """The static scale of a packed layer's input; None: there is none."""
        ...


class MappedSource:
    """The same by an architecture's weight map, where no list of published names has it."""

    def __init__(self, assembly: Assembly, checkpoint: Checkpoint) -> None:
        self._assembly = assembly
        self._checkpoint = checkpoint

    def read(self, module: str, leaf: str) -> torch.Tensor:
        return self._assembly.mapped[f"{module}.{leaf}"].load(self._checkpoint)

    def is_packed(self, module: str) -> bool:
        """Never: packed layers are only read for listed architectures."""
        return False

    def input_scale(self, module: str) -> float | None:
        return None


class SourceTensors:
    """Tensors by our modules' names; one file is open at a time."""

    def __init__(
        self,
        folder: Path,
        infos: dict[str, TensorInfo],
        kind: str,
        first_layer: int,
        packing: Packing | None,
        inner: str | None = None,
    ) -> None:
        self._folder = folder
        self._infos = infos
        self._kind = kind
        self._first = first_layer
        self._inner = inner
        self.packing = packing
        prefixes = (p for p in PREFIXES.get(kind, ()) if any(name.startswith(p) for name in infos))
        self._prefix = next(prefixes, "")
        self._open = OpenShard()

    @classmethod
    def open(cls, checkpoint: Path, config: DecoderConfig, layers: tuple[int, ...] | None) -> Self:
        """Of a checkpoint's folder, or a ``.pt`` file of OpenAI's, cut to ``layers``; no tensor is read."""
        first = 0 if layers is None else layers[0]
        if is_openai(checkpoint):
            return cls(checkpoint.parent, scan_shard(checkpoint, STATE), OPENAI, first, None, STATE)
        names = list_files(checkpoint)
        infos: dict[str, TensorInfo] = {}
        layout = find_layout(checkpoint, names)
        for file in layout.files:
            infos |= {
                name: info
                for name, info in scan_shard(checkpoint / file).items()
                if layout.index is None or layout.index.get(name) == file
            }
        return cls(checkpoint, infos, config.architecture, first, Packing.of(checkpoint, names))

    @staticmethod
    def knows(config: DecoderConfig) -> bool:
        """Whether the names of an architecture are known; those that a process registered are not."""
        return config.architecture in TABLES

    def read(self, module: str, leaf: str) -> torch.Tensor:
        """As of ``Source``: parts one below another; packed ones in fp32, by what they mean."""
        made = self._made(module)
        parts = [self._part(name, leaf, made) for name in made.modules]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        joined = joined[made.first_row :]
        return joined.float() + made.plus if made.plus else joined

    def is_packed(self, module: str) -> bool:
        packing = self.packing
        return packing is not None and all(packing.packs(name, self._infos) for name in self._stored(module))

    def input_scale(self, module: str) -> float | None:
        name = f"{self._stored(module)[0]}.input_scale"
        return float(self._tensor(name)) if name in self._infos else None

    def _made(self, module: str) -> StackedModules:
        found = made_of(self._kind, module, self._first)
        if found is None:
            raise CheckpointError("no source is known of a module", seen=module, allowed=sorted(TABLES))
        return found

    def _stored(self, module: str) -> list[str]:
        return [self._named(name) for name in self._made(module).modules]

    def _named(self, module: str) -> str:
        """With the files' prefix; a head is without one."""
        return module if module == HEAD else self._prefix + module

    def _part(self, name: str, leaf: str, made: StackedModules) -> torch.Tensor:
        module = self._named(name)
        stored = f"{module}.{made.leaf or leaf}"
        if leaf == "weight" and self.packing is not None and self.packing.packs(module, self._infos):
            names = {end: f"{module}.{end}" for end in ENDS[self.packing.kind]}
            found = {end: self._tensor(own) for end, own in names.items() if own in self._infos}
            return meant(self.packing, found)
        others = [self._infos.get(f"{self._named(one)}.bias") for one in made.modules if leaf == "bias"]
        beside = next((info for info in others if info is not None), None)
        if stored not in self._infos and beside is not None:
            return torch.zeros(beside.shape, dtype=beside.dtype)  # Whisper's keys, as many as its values
        tensor = self._tensor(stored)
        return tensor.t() if made.transposed and tensor.dim() == 2 else tensor

    def _tensor(self, name: str) -> torch.Tensor:
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(
                "the checkpoint lacks a tensor that the engine holds",
                seen=name,
                allowed=shorten(sorted(self._infos)),
                field="source",
                fix="`source=CHECKPOINT`, the one that the engine was built from",
            )
        return self._open.read(self._folder / info.file, self._inner, name)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
