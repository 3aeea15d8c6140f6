"""Host memory: of builds and loads, and checks for what has no ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.units import size_text
from ingot.device import parse_dtype
from ingot.errors import OutOfMemoryError
from ingot.memory.ledger import MemorySetting
from ingot.memory.memory_error import capacity_of
from ingot.memory.memory_sizes import CPU_PROCESS_BYTES, largest_weight_bytes, weight_bytes
from ingot.models.model_registry import find_architecture

PROCESS_BYTES = 800_000_000  # of a Python process with PyTorch and its CUDA libraries
_SHARD_BYTES = 5_000_000_000  # of a checkpoint, at most
_SMALL_FILES_BYTES = 16 << 20  # tokenizer, manifest, plan


def expect_room(what: str, num_bytes: int, fix: str) -> None:
    """Raise unless the default share of the available memory holds so many bytes beside the process.

    Args:
        what: the error's first sentence.
        fix: what needs less.

    Raises:
        OutOfMemoryError: it does not.
    """
    capacity = capacity_of(torch.device("cpu"), own=0)
    available = capacity.total - capacity.others
    room = int(available * RuntimeConfig().memory_fraction) - CPU_PROCESS_BYTES
    if num_bytes > room:
        raise OutOfMemoryError(
            what,
            seen=f"it takes {size_text(num_bytes)}",
            allowed=f"at most {size_text(max(room, 0))}; {size_text(available)} available ({capacity.name})",
            fix=fix,
        )


def expect_class_room(
    hf: Mapping[str, Any], dtype: torch.dtype, device: torch.device, fix: str, num_layers: int | None = None
) -> None:
    """``expect_room`` for the weights of Hugging Face's class on a CPU; a GPU's allocator reports that
    itself.

    Args:
        hf: the checkpoint's config.json.
        dtype: of the loaded weights.
        num_layers: how many layers are kept; None: all.
    """
    if device.type == "cpu":
        config = find_architecture(hf.get("architectures") or ()).read_config(dict(hf))
        config = config if num_layers is None else config.replace(num_layers=num_layers)
        what = "Hugging Face's class does not fit this machine's memory"
        expect_room(what, dense_bytes(config, dtype), fix)


def dense_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of a model's weights, all in ``dtype``, which no engine need have."""
    wide = torch.float32
    return sum(weight_bytes(config, QuantConfig(), wide).values()) // wide.itemsize * dtype.itemsize


@dataclass(frozen=True)
class HostBytes(JsonConfig):
    """Memory and disk of the host while an engine is built and while it is loaded.

    Attributes:
        build_memory, load_memory: bytes that must be free: the process and what it copies.
        build_mapped, load_mapped: bytes of mapped files beside that; the system may take them back.
        build_disk: of the engine's folder; an engine that it replaces stays until the end.
    """

    build_memory: int
    build_mapped: int
    build_disk: int
    load_memory: int
    load_mapped: int

    def rows(self) -> Iterator[tuple[str, int, str]]:
        """(what, bytes, remark), for people."""
        mapped = f"and {size_text(self.build_mapped)} of mapped files"
        yield "memory while building", self.build_memory, mapped
        yield "disk for the engine", self.build_disk, "next to the engine it replaces, if any"
        yield "memory while loading", self.load_memory, f"and {size_text(self.load_mapped)} of mapped files"


def host_ledger(setting: MemorySetting) -> HostBytes:
    """Memory and disk of the host for building and loading.

    A build maps one shard, which Hugging Face cuts at 5 GB, and holds the largest weight as it was read,
    joined and cast. A load maps the engine's file and holds one weight; on a CPU all of them stay, for a GPU
    an embedding on the host.
    """
    config, quant, on_gpu = setting.model, setting.quant, setting.device == "cuda"
    stored, loaded = (parse_dtype(one.wider) for one in (setting.stored_dtypes, setting.dtypes))
    disk = sum(weight_bytes(config, quant, setting.stored_dtypes).values()) + _SMALL_FILES_BYTES
    stay = 0 if on_gpu else sum(setting.weight_bytes().values())
    process = PROCESS_BYTES if on_gpu else CPU_PROCESS_BYTES
    stay += _pinned_bytes(setting.host_embedding_bytes)
    return HostBytes(
        build_memory=process + 2 * largest_weight_bytes(config, stored),
        build_mapped=min(disk, _SHARD_BYTES),
        build_disk=disk,
        load_memory=process + stay + largest_weight_bytes(config, loaded),
        load_mapped=disk,
    )


def _pinned_bytes(size: int) -> int:
    """What PyTorch's allocator of pinned memory takes for so many bytes: a power of two."""
    return 1 << (size - 1).bit_length() if size else 0
