"""The memory ledger: every byte that an engine will take, before any is allocated.

``MemorySetting`` says what is asked for, ``Capacity`` what there is. The runtime sizes its KV cache by the
same functions. Nothing is allocated or measured here; memory_sizes.py has the formulas, memory_fixes.py the
fixes.

    found = ledger(Setting(model, "fp16", 64, 4096), Capacity("H200", 150_109_880_320))
    found.fits, found.needed, found.requests_at_once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ingot.config.build_config import NARROW_KV_DTYPES
from ingot.config.decoder_config import DecoderConfig
from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.units import size_text
from ingot.device import parse_dtype
from ingot.memory.memory_sizes import (
    CPU_PROCESS_BYTES,
    HostBytes,
    activation_bytes,
    cache_dtype,
    encoded_at_once,
    encoded_position_bytes,
    encoder_blocks,
    encoding_bytes,
    host_bytes,
    kv_bytes_per_token,
    largest_weight_bytes,
    rotary_bytes,
    weight_bytes,
)
from ingot.memory.step_memory import all_step_buffers_bytes, graph_bytes, layered_bytes, sampling_bytes

# An H200 with torch 2.11: gone once a process has a CUDA context and has multiplied two matrices.
CONTEXT_BYTES = 685 << 20
WORKSPACE_BYTES = 3 * 32 << 20  # of the matrix library on an H200: eager, decode and prompt graphs' streams
RESERVE_BYTES = 1 << 30  # held back for graphs, their logits, step buffers and the sampler's temporaries
CPU_CACHE_BYTES = 256 << 20  # of KV cache that a CPU takes unasked


@dataclass(frozen=True)
class MemorySetting(JsonConfig):
    """What is asked for.

    Attributes:
        dtype: of arithmetic and loaded weights: ``fp16``, ``bf16``, ``fp32``.
        stored_dtype: of the engine's file; empty: ``dtype``.
        device: the kind of machine.
    """

    model: DecoderConfig
    dtype: str
    max_batch_size: int
    max_seq_len: int
    stored_dtype: str = ""
    device: Literal["cuda", "cpu"] = "cuda"
    quant: QuantConfig = field(default_factory=QuantConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    @property
    def block_bytes(self) -> int:
        """Bytes of one cache block in all layers."""
        return kv_bytes_per_token(self.model, self.kv_dtype) * self.runtime.block_size

    @property
    def kv_dtype(self) -> torch.dtype:
        """What the KV cache holds."""
        return cache_dtype(parse_dtype(self.dtype), self.runtime.kv_dtype)

    @property
    def blocks_per_request(self) -> int:
        """Cache blocks of a request of ``max_seq_len`` tokens."""
        return -(-self.max_seq_len // self.runtime.block_size)

    @property
    def encoder_blocks(self) -> int:
        """Blocks of the encoder cache; 0 without an encoder."""
        return encoder_blocks(self.model, self.runtime, self.max_batch_size)

    @property
    def wanted_blocks(self) -> int:
        """Cache blocks of a full batch of longest requests, or of ``cache_tokens``; a CPU takes 256 MiB of
        that unasked, or one longest request where that is more.
        """
        if self.runtime.cache_tokens is not None:
            return -(-self.runtime.cache_tokens // self.runtime.block_size)
        wanted = self.blocks_per_request * self.max_batch_size
        if self.device == "cpu":
            return max(min(wanted, CPU_CACHE_BYTES // self.block_bytes), self.blocks_per_request)
        return wanted


@dataclass(frozen=True)
class Capacity(JsonConfig):
    """What there is: bytes in all, and those that others hold: on a CPU, all that are not available."""

    name: str
    total: int
    others: int = 0


@dataclass(frozen=True)
class LedgerItem(JsonConfig):
    """One line of the bill. ``kind`` is one of ``KINDS``."""

    kind: str
    name: str
    bytes: int
    note: str = ""


KINDS = ("weights", "KV cache", "activations", "encoders", "reserve", "process")


@dataclass(frozen=True)
class Ledger:
    """The bill of a setting and, with a capacity, the verdict.

    Attributes:
        items: what the device will hold; those of kind ``reserve`` are what ``RESERVE_BYTES`` are held back
            for, the last of them what none of them claims.
    """

    setting: MemorySetting
    items: tuple[LedgerItem, ...]
    capacity: Capacity | None = None

    @property
    def needed(self) -> int:
        """Bytes for all that was asked."""
        return sum(item.bytes for item in self.items)

    @property
    def fixed(self) -> int:
        """Bytes that are taken whatever the cache's size."""
        return self.needed - self.of("KV cache")

    def of(self, kind: str) -> int:
        """Bytes of one kind."""
        return sum(item.bytes for item in self.items if item.kind == kind)

    @property
    def usable(self) -> int | None:
        """Bytes that there are for it: of a GPU ``memory_fraction``, less what others hold; of a CPU that
        share of what is available, so that others keep some.
        """
        if self.capacity is None:
            return None
        total, others = self.capacity.total, self.capacity.others
        fraction = self.setting.runtime.memory_fraction
        if self.setting.device == "cpu":
            return int((total - others) * fraction)
        return int(total * fraction) - others

    @property
    def blocks(self) -> int:
        """Cache blocks that there will be: as wanted, or as many as fit."""
        wanted = self.setting.wanted_blocks
        return (
            wanted if self.usable is None else min(wanted, blocks_in(self.usable - self.fixed, self.setting))
        )

    @property
    def loads(self) -> bool:
        """Whether it will start: the cache that fits holds one longest request."""
        return self.blocks >= self.setting.blocks_per_request

    @property
    def least(self) -> int:
        """Bytes without which it does not start: the cache of one longest request, or the smaller one that
        was asked for.
        """
        blocks = min(self.setting.wanted_blocks, self.setting.blocks_per_request)
        return self.fixed + blocks * self.setting.block_bytes

    @property
    def fits(self) -> bool:
        """Whether all of it fits, the whole cache that was asked for included."""
        return self.loads and self.blocks == self.setting.wanted_blocks

    @property
    def requests_at_once(self) -> int:
        """Requests of the longest length that the cache holds together."""
        return min(max(self.blocks, 0) // self.setting.blocks_per_request, self.setting.max_batch_size)

    @property
    def used(self) -> int:
        """Bytes that the device holds at most with the cache that fits, the unclaimed reserve apart."""
        spare = sum(item.bytes for item in self.items if item.name == UNCLAIMED)
        return self.fixed - spare + max(self.blocks, 0) * self.setting.block_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain dict of JSON types, sums and verdict included."""
        cache_tokens = max(self.blocks, 0) * self.setting.runtime.block_size
        return {
            "setting": self.setting.to_json(),
            "capacity": None if self.capacity is None else self.capacity.to_json(),
            "items": [item.to_json() for item in self.items],
            "by_kind": {kind: self.of(kind) for kind in KINDS},
            "needed_bytes": self.needed,
            "usable_bytes": self.usable,
            "used_bytes": self.used,
            "kv_bytes_per_token": self.setting.block_bytes // self.setting.runtime.block_size,
            "cache_tokens": cache_tokens,
            "requests_at_once": self.requests_at_once,
            "loads": self.loads if self.capacity is not None else None,
            "fits": self.fits if self.capacity is not None else None,
        }

    def lines(self) -> Iterator[str]:
        """The bill and what there is, a few lines for an error."""
        setting = self.setting
        parts = [f"{kind} {size_text(self.of(kind))}" for kind in KINDS if self.of(kind)]
        asked = f"{setting.max_batch_size} x {setting.max_seq_len} tokens in {setting.dtype}"
        if setting.runtime.cache_tokens is not None:
            asked = f"a cache of {setting.runtime.cache_tokens} tokens in {setting.dtype}"
        yield f"needs {size_text(self.needed)} for {asked}: {', '.join(parts)}"
        if self.capacity is not None and self.usable is not None:
            yield self._supply(self.capacity, self.usable)

    def _supply(self, capacity: Capacity, usable: int) -> str:
        share = f", memory_fraction {self.setting.runtime.memory_fraction:g}"
        head = f"the device has {size_text(capacity.total)} ({capacity.name})"
        if self.setting.device == "cpu":
            head += f", {size_text(max(capacity.total - capacity.others, 0))} available{share}"
        else:
            others = f", other processes hold {size_text(capacity.others)}" if capacity.others else ""
            head += f"{share}{others}"
        return f"{head}: {size_text(max(usable, 0))} usable"


UNCLAIMED = "unclaimed"


def ledger(
    setting: MemorySetting, capacity: Capacity | None = None, weights: Mapping[str, int] | None = None
) -> Ledger:
    """The bill of a setting.

    Args:
        weights: ``weight_bytes`` of the model in the setting's dtype and scheme, where the caller has them.
    """
    if weights is None:
        weights = weight_bytes(setting.model, setting.quant, parse_dtype(setting.dtype))
    return Ledger(setting, tuple(_items(setting, weights)), capacity)


def host_ledger(setting: MemorySetting) -> HostBytes:
    """What building and loading take of the host and its disk."""
    stored = parse_dtype(setting.stored_dtype or setting.dtype)
    on_gpu = setting.device == "cuda"
    return host_bytes(setting.model, setting.quant, stored, parse_dtype(setting.dtype), on_gpu=on_gpu)


def blocks_in(room: int, setting: MemorySetting) -> int:
    """Whole cache blocks in so many bytes; below zero where there are none."""
    return room // setting.block_bytes


def _items(setting: MemorySetting, weights: Mapping[str, int]) -> Iterator[LedgerItem]:
    model, runtime, batch = setting.model, setting.runtime, setting.max_batch_size
    dtype, on_gpu = parse_dtype(setting.dtype), setting.device == "cuda"
    for kind, size in weights.items():
        yield LedgerItem("weights", kind, size, _stored_as(setting, kind))
    table = rotary_bytes(model, setting.max_seq_len)
    yield LedgerItem("weights", "rotary table", table, f"fp32, {setting.max_seq_len} positions")
    blocks = setting.wanted_blocks
    tokens = f"{blocks} blocks of {runtime.block_size} tokens, {size_text(setting.block_bytes)} each"
    tokens += f", {runtime.kv_dtype}" if runtime.kv_dtype in NARROW_KV_DTYPES else ""
    yield LedgerItem("KV cache", "keys and values", blocks * setting.block_bytes, tokens)
    activations = activation_bytes(model, dtype, runtime, batch, kernels=on_gpu, quant=setting.quant)
    yield LedgerItem("activations", "largest step", activations, f"token_budget {runtime.token_budget}")
    yield from _encoder_items(setting)
    yield from _gpu_items(setting) if on_gpu else _cpu_items(setting, activations)


def _encoder_items(setting: MemorySetting) -> Iterator[LedgerItem]:
    """Beside the encoder's weights."""
    model, runtime, dtype = setting.model, setting.runtime, parse_dtype(setting.dtype)
    if model.encoder is None:
        yield LedgerItem("encoders", "none", 0)
        return
    positions = setting.encoder_blocks * runtime.block_size
    held = "embeddings" if model.splices else "keys and values"
    narrow = runtime.kv_dtype in NARROW_KV_DTYPES and model.crosses
    size = positions * encoded_position_bytes(model, dtype, setting.kv_dtype)
    yield LedgerItem(
        "encoders",
        "encoder cache",
        size,
        f"{held} of {positions} positions" + (f", {runtime.kv_dtype}" if narrow else ""),
    )
    on_gpu, most = setting.device == "cuda", model.encoder.max_positions
    encoding = encoding_bytes(model, dtype, runtime, setting.max_batch_size, on_gpu=on_gpu)
    inputs = encoded_at_once(model.encoder, runtime, on_gpu=on_gpu)
    yield LedgerItem("encoders", "encoding", encoding, f"{inputs} of {most} positions at once")


def _stored_as(setting: MemorySetting, kind: str) -> str:
    quant = setting.quant
    if kind == "head" and setting.model.tie_word_embeddings and quant.head == "none":
        return "tied: the embedding's"
    own = {"head": quant.head, "attention": quant.layers_label, "mlp": quant.layers_label}.get(kind, "none")
    return setting.dtype if own == "none" else f"{setting.dtype}, {own}"


def _gpu_items(setting: MemorySetting) -> Iterator[LedgerItem]:
    model, runtime, batch = setting.model, setting.runtime, setting.max_batch_size
    graphs = graph_bytes(model, parse_dtype(setting.dtype), batch) if runtime.cuda_graphs else 0
    buffers = all_step_buffers_bytes(model, runtime, batch, setting.max_seq_len, graphs=runtime.cuda_graphs)
    claims = (
        LedgerItem("reserve", "CUDA graphs", graphs, "all that warm-up captures"),
        LedgerItem("reserve", "step buffers", buffers),
        *_layered_item(setting),
        LedgerItem("reserve", "sampling", sampling_bytes(model, batch, setting.max_seq_len)),
        LedgerItem("reserve", "library workspaces", WORKSPACE_BYTES),
    )
    yield from claims
    spare = max(RESERVE_BYTES - sum(claim.bytes for claim in claims), 0)
    yield LedgerItem("reserve", UNCLAIMED, spare, f"of {size_text(RESERVE_BYTES)} held back")
    yield LedgerItem("process", "CUDA context", CONTEXT_BYTES)


def _layered_item(setting: MemorySetting) -> Iterator[LedgerItem]:
    """Of a setting whose long prompts are computed a few layers per step."""
    dtype = parse_dtype(setting.dtype)
    size = layered_bytes(setting.model, dtype, setting.runtime, setting.max_seq_len)
    if size:
        yield LedgerItem(
            "reserve", "a chunk between layers", size, f"prompt_share {setting.runtime.prompt_share}"
        )


def _cpu_items(setting: MemorySetting, activations: int) -> Iterator[LedgerItem]:
    model, runtime, batch = setting.model, setting.runtime, setting.max_batch_size
    spare = largest_weight_bytes(model, parse_dtype(setting.dtype)) - activations  # not there at once
    yield LedgerItem("reserve", "a weight while loading", max(spare, 0))
    buffers = all_step_buffers_bytes(model, runtime, batch, setting.max_seq_len, graphs=False)
    yield LedgerItem("reserve", "step buffers", buffers)
    yield from _layered_item(setting)
    yield LedgerItem("reserve", "sampling", sampling_bytes(model, batch, setting.max_seq_len, kernels=False))
    yield LedgerItem("process", "Python and PyTorch", CPU_PROCESS_BYTES)
