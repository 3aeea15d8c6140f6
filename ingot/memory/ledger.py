"""The memory ledger: every byte that an engine will take, before any is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ingot.config.build_config import NARROW_KV_DTYPES
from ingot.config.decoder_config import DecoderConfig
from ingot.config.half_dtypes import HalfDtypes
from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.units import size_text
from ingot.device import parse_dtype
from ingot.errors import ConfigError
from ingot.layers.rotary import RotaryTable
from ingot.memory.memory_sizes import (
    CPU_PROCESS_BYTES,
    OnCpu,
    activation_bytes,
    cache_dtype,
    encoded_at_once,
    encoded_position_bytes,
    encoder_blocks,
    encoding_bytes,
    kv_bytes_per_token,
    largest_weight_bytes,
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
        encoder_dtype, stored_encoder_dtype: the same of an encoder, where it has another dtype; None: it has
            not.
    """

    model: DecoderConfig
    dtype: str
    max_batch_size: int
    max_seq_len: int
    stored_dtype: str = ""
    device: Literal["cuda", "cpu"] = "cuda"
    quant: QuantConfig = field(default_factory=QuantConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    encoder_dtype: str | None = None
    stored_encoder_dtype: str | None = None

    @property
    def dtypes(self) -> HalfDtypes:
        """Of arithmetic and loaded weights, of both halves."""
        return HalfDtypes.of(self.dtype, self.encoder_dtype)

    @property
    def stored_dtypes(self) -> HalfDtypes:
        """Of the engine's file, of both halves."""
        stored = HalfDtypes.of(self.stored_dtype, self.stored_encoder_dtype)
        return stored if self.stored_dtype else self.dtypes

    @property
    def block_bytes(self) -> int:
        """Bytes of one cache block in all layers."""
        return kv_bytes_per_token(self.model, self.kv_dtype) * self.runtime.block_size

    @property
    def kv_dtype(self) -> torch.dtype:
        return cache_dtype(parse_dtype(self.dtype), self.runtime.kv_dtype)

    @property
    def blocks_per_request(self) -> int:
        """Cache blocks of a request of ``max_seq_len`` tokens."""
        return -(-self.max_seq_len // self.runtime.block_size)

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the embedding, as of ``Decoder``."""
        quant = self.quant
        return self.model.tie_word_embeddings and quant.head == "none" and not quant.rotation

    @property
    def on_cpu(self) -> OnCpu | None:
        """How a CPU holds the weights; None: on a GPU."""
        if self.device == "cuda":
            return None
        packs = self.runtime.fused_decode and not self.runtime.batch_invariant
        return OnCpu(self.stored_dtypes, packs)

    @property
    def unpacked(self) -> MemorySetting:
        """With weights as they are stored, dense ones in the dtype of arithmetic."""
        return self.replace(runtime=self.runtime.replace(fused_decode=False))

    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the loaded weights by kind."""
        return weight_bytes(self.model, self.quant, self.dtypes, self.on_cpu)

    @property
    def host_embedding_bytes(self) -> int:
        """Bytes of the token embedding that a GPU reads from the host; 0: it is on the device."""
        if self.device == "cpu" or self.runtime.embedding == "device" or self.tied:
            return 0
        return self.model.vocab_size * self.model.hidden_size * parse_dtype(self.dtype).itemsize

    @property
    def encoder_blocks(self) -> int:
        """Blocks of the encoder cache; 0 without an encoder."""
        return encoder_blocks(self.model, self.runtime, self.max_batch_size)

    @property
    def wanted_blocks(self) -> int:
        """Cache blocks of a full batch of longest requests, or of ``cache_tokens``; a CPU takes at most 256
        MiB unasked, or one longest request.
        """
        if self.runtime.cache_tokens is not None:
            return -(-self.runtime.cache_tokens // self.runtime.block_size)
        wanted = self.blocks_per_request * self.max_batch_size
        if self.device == "cpu":
            return max(min(wanted, CPU_CACHE_BYTES // self.block_bytes), self.blocks_per_request)
        return wanted


@dataclass(frozen=True)
class Capacity(JsonConfig):
    """Total bytes, and those that others hold: on a CPU, all that are not available."""

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
        items: what the device will hold; those of kind ``reserve`` are counted into ``RESERVE_BYTES``, the
            last of them being the rest.
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
        """Bytes that do not depend on the cache's size."""
        return self.needed - self.of("KV cache")

    def of(self, kind: str) -> int:
        return sum(item.bytes for item in self.items if item.kind == kind)

    @property
    def usable(self) -> int | None:
        """``memory_fraction`` of a GPU's bytes, less others', or of a CPU's available ones."""
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
        if self.usable is None:
            return wanted
        return min(wanted, blocks_in(self.usable - self.fixed, self.setting))

    @property
    def loads(self) -> bool:
        """Whether it will start: the cache holds one longest request."""
        return self.blocks >= self.setting.blocks_per_request

    @property
    def least(self) -> int:
        """Bytes that starting needs: the cache of one longest request, or the smaller one asked for."""
        blocks = min(self.setting.wanted_blocks, self.setting.blocks_per_request)
        return self.fixed + blocks * self.setting.block_bytes

    @property
    def fits(self) -> bool:
        """Whether all of it fits, with the full cache."""
        return self.loads and self.blocks == self.setting.wanted_blocks

    @property
    def requests_at_once(self) -> int:
        """Requests of the longest length that the cache holds at once."""
        return min(max(self.blocks, 0) // self.setting.blocks_per_request, self.setting.max_batch_size)

    @property
    def used(self) -> int:
        """Most bytes that the device holds with the cache that fits, without the unclaimed reserve."""
        spare = sum(item.bytes for item in self.items if item.name == UNCLAIMED)
        return self.fixed - spare + max(self.blocks, 0) * self.setting.block_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain dict of JSON types, with sums and verdict."""
        known = self.capacity is not None
        return {
            "setting": self.setting.to_json(),
            "capacity": None if self.capacity is None else self.capacity.to_json(),
            "items": [item.to_json() for item in self.items],
            "by_kind": {kind: self.of(kind) for kind in KINDS},
            "needed_bytes": self.needed,
            "usable_bytes": self.usable,
            "used_bytes": self.used,
            "kv_bytes_per_token": self.setting.block_bytes // self.setting.runtime.block_size,
            "cache_tokens": max(self.blocks, 0) * self.setting.runtime.block_size,
            "requests_at_once": self.requests_at_once,
            "loads": self.loads if known else None,
            "fits": self.fits if known else None,
        }

    def lines(self) -> Iterator[str]:
        """Needs and supply, a few lines for an error."""
        setting = self.setting
        parts = [f"{kind} {size_text(self.of(kind))}" for kind in KINDS if self.of(kind)]
        asked = f"{setting.max_batch_size} x {setting.max_seq_len} tokens in {setting.dtypes}"
        if setting.runtime.cache_tokens is not None:
            asked = f"a cache of {setting.runtime.cache_tokens} tokens in {setting.dtypes}"
        yield f"needs {size_text(self.needed)} for {asked}: {', '.join(parts)}"
        capacity, usable = self.capacity, self.usable
        if capacity is None or usable is None:
            return
        share = f", memory_fraction {setting.runtime.memory_fraction:g}"
        head = f"the device has {size_text(capacity.total)} ({capacity.name})"
        if setting.device == "cpu":
            head += f", {size_text(max(capacity.total - capacity.others, 0))} available{share}"
        else:
            others = f", other processes hold {size_text(capacity.others)}" if capacity.others else ""
            head += f"{share}{others}"
        yield f"{head}: {size_text(max(usable, 0))} usable"


UNCLAIMED = "unclaimed"


def expect_own_embedding(setting: MemorySetting) -> None:
    """Raise unless the embedding may stay where the runtime keeps it.

    Raises:
        ConfigError: it is to stay on the host, and is the head too, which every step multiplies by.
    """
    if setting.device == "cuda" and setting.runtime.embedding == "host" and setting.tied:
        raise ConfigError(
            "the embedding cannot stay on the host: it is also the head",
            seen="embedding host, and a head that is tied",
            allowed="device",
            field="embedding",
            fix="leave out `embedding`, or `ingot build` with `head`: a head of its own, in 8 bits",
        )


def ledger(
    setting: MemorySetting, capacity: Capacity | None = None, weights: Mapping[str, int] | None = None
) -> Ledger:
    """The bill of a setting. Where a CPU has no room to pack quantized weights, but to keep them as they are
    stored, it is of that setting (``MemorySetting.unpacked``).

    Args:
        weights: ``weight_bytes`` of the model in the setting's dtype and scheme, where the caller has them.
    """
    known = setting.weight_bytes() if weights is None else weights
    found = Ledger(setting, tuple(_items(setting, known)), capacity)
    if weights is None and setting.on_cpu is not None and setting.on_cpu.packs and not found.loads:
        stored = ledger(setting.unpacked, capacity)
        return stored if stored.fixed < found.fixed else found
    return found


def blocks_in(room: int, setting: MemorySetting) -> int:
    """Full cache blocks in so many bytes; negative where there are none."""
    return room // setting.block_bytes


def _items(setting: MemorySetting, weights: Mapping[str, int]) -> Iterator[LedgerItem]:
    model, runtime, batch = setting.model, setting.runtime, setting.max_batch_size
    dtype, quant, on_gpu = parse_dtype(setting.dtype), setting.quant, setting.device == "cuda"
    schemes = {"head": quant.head, "attention": quant.layers_label, "mlp": quant.layers_label}
    for kind, size in weights.items():
        own = schemes.get(kind, "none")
        stored = setting.dtypes.encoder if kind == "encoder" else setting.dtype
        note = stored if own == "none" else f"{stored}, {own}"
        if kind == "head" and model.tie_word_embeddings and own == "none":
            note = "packed from the embedding's" if size else "tied: the embedding's"
        on_host = setting.host_embedding_bytes if kind == "embedding" else 0
        if on_host:
            note = f"{size_text(on_host)} on the host"
        yield LedgerItem("weights", kind, size - on_host, note)
    ropes = [rope for rope in (model.rope, model.local_rope) if rope is not None]
    table = sum(RotaryTable.table_bytes(rope, setting.max_seq_len) for rope in ropes)
    places = f"fp32, {setting.max_seq_len} positions{', two bases' if len(ropes) > 1 else ''}"
    yield LedgerItem("weights", "rotary table", table, places)
    blocks = setting.wanted_blocks
    narrow = f", {runtime.kv_dtype}" if runtime.kv_dtype in NARROW_KV_DTYPES else ""
    tokens = f"{blocks} blocks of {runtime.block_size} tokens, {size_text(setting.block_bytes)} each{narrow}"
    yield LedgerItem("KV cache", "keys and values", blocks * setting.block_bytes, tokens)
    activations = activation_bytes(model, dtype, runtime, batch, kernels=on_gpu, quant=quant)
    wide = runtime.step_budget > runtime.token_budget
    note = f"prompt_budget {runtime.step_budget}" if wide else f"token_budget {runtime.token_budget}"
    yield LedgerItem("activations", "largest step", activations, note)
    if model.encoder is None:
        yield LedgerItem("encoders", "none", 0)
    else:
        positions = setting.encoder_blocks * runtime.block_size
        size = positions * encoded_position_bytes(model, dtype, setting.kv_dtype)
        held = "embeddings" if model.splices else "keys and values"
        note = f"{held} of {positions} positions{narrow if model.crosses else ''}"
        yield LedgerItem("encoders", "encoder cache", size, note)
        encoding = encoding_bytes(model, setting.dtypes, runtime, batch, on_gpu=on_gpu)
        inputs = encoded_at_once(model.encoder, runtime, on_gpu=on_gpu)
        note = f"{inputs} of {model.encoder.max_positions} positions at once"
        yield LedgerItem("encoders", "encoding", encoding, note)
    yield from _reserve(setting, activations)


def _reserve(setting: MemorySetting, activations: int) -> Iterator[LedgerItem]:
    model, runtime, batch = setting.model, setting.runtime, setting.max_batch_size
    dtype, on_gpu, length = parse_dtype(setting.dtype), setting.device == "cuda", setting.max_seq_len
    graphs = on_gpu and runtime.cuda_graphs
    if on_gpu:
        size = graph_bytes(model, dtype, batch) if graphs else 0
        claims = [LedgerItem("reserve", "CUDA graphs", size, "all that warm-up captures")]
    else:  # the largest weight and the activations are not there at once
        size = max(largest_weight_bytes(model, dtype) - activations, 0)
        claims = [LedgerItem("reserve", "a weight while loading", size)]
    buffers = all_step_buffers_bytes(model, runtime, batch, length, graphs=graphs)
    claims.append(LedgerItem("reserve", "step buffers", buffers))
    layered = layered_bytes(model, dtype, runtime, length)
    if layered:
        note = f"prompt_share {runtime.prompt_share}"
        claims.append(LedgerItem("reserve", "a chunk between layers", layered, note))
    sampling = sampling_bytes(model, batch, length, kernels=on_gpu)
    claims.append(LedgerItem("reserve", "sampling", sampling))
    if not on_gpu:
        yield from (*claims, LedgerItem("process", "Python and PyTorch", CPU_PROCESS_BYTES))
        return
    claims.append(LedgerItem("reserve", "library workspaces", WORKSPACE_BYTES))
    yield from claims
    spare = max(RESERVE_BYTES - sum(claim.bytes for claim in claims), 0)
    yield LedgerItem("reserve", UNCLAIMED, spare, f"of {size_text(RESERVE_BYTES)} held back")
    yield LedgerItem("process", "CUDA context", CONTEXT_BYTES)
