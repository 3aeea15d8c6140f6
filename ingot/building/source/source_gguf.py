"""The tensors of a GGUF file by our modules' names, one value at a time by index.

This second reading shares with the first (checkpoint/gguf/gguf_weights.py and the ``gguf`` package) only the
file's header and bytes. Source: the ``block_*`` structures of llama.cpp's ggml-common.h.
"""

from __future__ import annotations

import math
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

    def _part(self, name: str, leaf: str) -> torch.Tensor:
        stored = f"{name}.{leaf}"
        info = self._file.tensors.get(stored)
        if info is None:
            raise CheckpointError(
                "the checkpoint lacks a tensor that the engine holds",
                seen=stored,
                allowed=shorten(sorted(self._file.tensors)),
                field="source",
                fix="`source=CHECKPOINT`, the one that the engine was built from",
            )
        content = torch.from_numpy(self._file.blocks(stored))
        if info.type.name in _PLAIN:
            values = content.view(_PLAIN[info.type.name])
        else:
            place = torch.arange(info.type.values)
            blocks = content.view(-1, info.type.bytes).split(_AT_ONCE)
            values = torch.empty(math.prod(info.shape) // len(place), len(place))
            for out, part in zip(values.split(_AT_ONCE), blocks, strict=True):
                out.copy_(MEANT[info.type.name](part, place))
        rows = values.view(info.shape)
        heads = {"attn_q": self._config.num_heads, "attn_k": self._config.num_kv_heads}
        kind = name.rpartition(".")[2]
        if self._config.architecture != "llama" or kind not in heads:
            return rows
        # Channel c of a head is in row 2 c of it, those of the second half in the odd rows.
        size = len(rows) // heads[kind]
        row, half = torch.arange(len(rows)), size // 2
        channel = row % size
        return rows[row - channel + torch.where(channel < half, 2 * channel, 2 * (channel - half) + 1)]


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
