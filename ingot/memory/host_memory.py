"""Room in the host's memory for what has no ledger: builds, and the models that engines are compared with.

Covers the comparison before anything is allocated.

    expect_room("the build does not fit this machine's memory", 30_000_000_000, fix="free some of it")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.units import size_text
from ingot.errors import OutOfMemoryError
from ingot.memory.memory_error import capacity_of
from ingot.memory.memory_sizes import CPU_PROCESS_BYTES, weight_bytes
from ingot.models.model_registry import find_architecture


def expect_room(what: str, num_bytes: int, fix: str) -> None:
    """Raise unless the default share of the memory that is available holds so many bytes beside the process.

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
    """``expect_room`` for the weights of Hugging Face's class on a CPU; a GPU's allocator says so itself.

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
    """Bytes of a model's weights, all in ``dtype``, which may be one that no engine has."""
    wide = torch.float32
    return sum(weight_bytes(config, QuantConfig(), wide).values()) // wide.itemsize * dtype.itemsize
