"""The tensors of a GGUF file by our modules' names, one value at a time by index.

This second reading shares with the first (checkpoint/gguf/gguf_weights.py and the ``gguf`` package) only the
file's header and bytes. Source: the ``block_*`` structures of llama.cpp's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ingot.building.source.source_names import made_of
from ingot.checkpoint.checkpoint_files import shorten
from ingot.checkpoint.gguf.gguf_file import GgufFile
from ingot.config.decoder_config import DecoderConfig
from ingot.config.quantization.quant_config import HEAD
from ingot.errors import CheckpointError

_OWN = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_STORED = ("Q8_0", "Q4_0")  # whose values an engine may keep
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AT_ONCE = 1 << 13  # blocks

Blocks = torch.Tensor  # uint8 [blocks, bytes]
Places = torch.Tensor  # int64: the values of a block by their place


class GgufSource:
    """As ``Source``: a file's tensors, cut to ``layers``."""

    def __init__(self, file: GgufFile, config: DecoderConfig, layers: tuple[int, ...] | None) -> None:
        self._file = file
        self._config = config
        self._first = 0 if layers is None else layers[0]

    def read(self, module: str, leaf: str) -> torch.Tensor:
        """Parts one below another; quantized ones in fp32, by what they mean."""
        parts = [self._part(name, leaf) for name in self._stored(module)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def is_packed(self, module: str) -> bool:
        names = [f"{name}.weight" for name in self._stored(module)]
        return module != HEAD and all(self._file.tensors[name].type.name in _STORED for name in names)

    def input_scale(self, module: str) -> float | None:
        return None

    def _stored(self, module: str) -> list[str]:
        made = made_of(self._config.architecture, module, self._first)
        if made is None:
            raise CheckpointError("no source is known of a module", seen=module)
        return [_own_name(name) for name in made.modules]

    def rows(self, module: str, leaf: str) -> GgufRows | None:
        """A tensor whose rows are read when they are asked for; None where it is not one of the file's as it
        is.
        """
        names = self._stored(module)
        if len(names) != 1 or self._heads(names[0]) is not None:
            return None
        return GgufRows(self._file, self._expect(f"{names[0]}.{leaf}"))

    def _expect(self, stored: str) -> str:
        """A tensor's name; CheckpointError where the file has no such tensor."""
        if stored not in self._file.tensors:
            raise CheckpointError(
                "the checkpoint lacks a tensor that the engine holds",
                seen=stored,
                allowed=shorten(sorted(self._file.tensors)),
                field="source",
                fix="`source=CHECKPOINT`, the one that the engine was built from",
            )
        return stored

    def _heads(self, name: str) -> int | None:
        """How many heads a module's rows are of, where llama.cpp moves the rows of each."""
        heads = {"attn_q": self._config.num_heads, "attn_k": self._config.num_kv_heads}
        return heads.get(name.rpartition(".")[2]) if self._config.architecture == "llama" else None

    def _part(self, name: str, leaf: str) -> torch.Tensor:
        rows, heads = GgufRows(self._file, self._expect(f"{name}.{leaf}"))[:], self._heads(name)
        if heads is None:
            return rows
        # Channel c of a head is in row 2 c of it, those of the second half in the odd rows.
        size = len(rows) // heads
        row, half = torch.arange(len(rows)), size // 2
        channel = row % size
        return rows[row - channel + torch.where(channel < half, 2 * channel, 2 * (channel - half) + 1)]


class GgufRows:
    """A stored tensor; slices of it along its first dimension are read, quantized ones in fp32."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self._file = file
        self._name = name
        self.shape = file.tensors[name].shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        info = self._file.tensors[self._name]
        if len(self.shape) == 1:
            return self._values(0, 1).view(self.shape)[rows]
        start, stop, _ = rows.indices(self.shape[0])
        inner = info.num_rows // self.shape[0]
        return self._values(start * inner, stop * inner).view(stop - start, *self.shape[1:])

    def _values(self, start: int, stop: int) -> torch.Tensor:
        """Of the rows from ``start`` to ``stop``."""
        kind = self._file.tensors[self._name].type
        content = torch.from_numpy(self._file.blocks(self._name, start, stop))
        if kind.name in _PLAIN:
            return content.view(_PLAIN[kind.name])
        place = torch.arange(kind.values)
        blocks = content.view(-1, kind.bytes)
        values = torch.empty(len(blocks), len(place))
        for out, part in zip(values.split(_AT_ONCE), blocks.split(_AT_ONCE), strict=True):
            out.copy_(MEANT[kind.name](part, place))
        return values


def _own_name(module: str) -> str:
    if module in _OWN:
        return _OWN[module]
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_IN_LAYER[rest]}"


def _half(blocks: Blocks, place: int) -> torch.Tensor:
    """The fp16 at a byte, fp32 [blocks, 1]."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _bits(blocks: Blocks, byte: Places, shift: Places, count: int) -> torch.Tensor:
    """``count`` bits of each value, from a bit of a byte on."""
    return ((blocks[:, byte] >> shift.to(torch.uint8)) & (1 << count) - 1).float()


def _nibbles(blocks: Blocks, start: int, place: Places) -> torch.Tensor:
    """Of 32 values: the first half in the low nibbles of 16 bytes."""
    return _bits(blocks, start + place % 16, place // 16 * 4, 4)


def _q8_0(blocks: Blocks, place: Places) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2 + place].view(torch.int8).float()


def _q4_0(blocks: Blocks, place: Places) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks, 2, place) - 8)


def _q4_1(blocks: Blocks, place: Places) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks, 4, place) + _half(blocks, 2)


def _q5_0(blocks: Blocks, place: Places) -> torch.Tensor:
    fifth = _bits(blocks, 2 + place // 8, place % 8, 1)
    return _half(blocks, 0) * (_nibbles(blocks, 6, place) + 16 * fifth - 16)


def _q5_1(blocks: Blocks, place: Places) -> torch.Tensor:
    fifth = _bits(blocks, 4 + place // 8, place % 8, 1)
    return _half(blocks, 0) * (_nibbles(blocks, 8, place) + 16 * fifth) + _half(blocks, 2)


def _k_scales(blocks: Blocks, place: Places) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of Q4_K and Q5_K: 6 bits for each 32 values, from byte 4 on."""
    part = place // 32
    low, fourth = torch.where(part < 4, part, part - 4), part % 4
    early = _bits(blocks, 4 + fourth, 0 * part, 6), _bits(blocks, 8 + fourth, 0 * part, 6)
    late = (
        _bits(blocks, 12 + fourth, 0 * part, 4) + 16 * _bits(blocks, 4 + low, 0 * part + 6, 2),
        _bits(blocks, 12 + fourth, 0 * part + 4, 4) + 16 * _bits(blocks, 8 + low, 0 * part + 6, 2),
    )
    scale, least = (torch.where(part < 4, one, other) for one, other in zip(early, late, strict=True))
    return _half(blocks, 0) * scale, _half(blocks, 2) * least


def _q4_k(blocks: Blocks, place: Places) -> torch.Tensor:
    scale, least = _k_scales(blocks, place)
    return scale * _bits(blocks, 16 + place // 64 * 32 + place % 32, place // 32 % 2 * 4, 4) - least


def _q5_k(blocks: Blocks, place: Places) -> torch.Tensor:
    scale, least = _k_scales(blocks, place)
    nibble = _bits(blocks, 48 + place // 64 * 32 + place % 32, place // 32 % 2 * 4, 4)
    return scale * (nibble + 16 * _bits(blocks, 16 + place % 32, place // 32, 1)) - least


def _q6_k(blocks: Blocks, place: Places) -> torch.Tensor:
    part = place // 32 % 4
    nibble = _bits(blocks, place // 128 * 64 + part % 2 * 32 + place % 32, part // 2 * 4, 4)
    upper = _bits(blocks, 128 + place // 128 * 32 + place % 32, part * 2, 2)
    scale = blocks[:, 192 + place // 16].view(torch.int8).float()
    return _half(blocks, 208) * scale * (nibble + 16 * upper - 32)


MEANT: dict[str, Callable[[Blocks, Places], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
