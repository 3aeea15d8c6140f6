"""The tensors of a GGUF file under Hugging Face's names, with rows in Hugging Face's order.

llama.cpp turns the rows of LLaMA's queries and keys so that the two channels of a rotation are neighbours;
here they are a half apart again. Quantized layers whose values one of our schemes holds come in two pieces,
``x.weight`` (int8) and ``x.weight_scale`` (fp16, one per 32 columns); all other quantized tensors are widened
to fp32 by the ``gguf`` package.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ingot.checkpoint.gguf.gguf_config import EMBEDDING, FREQUENCIES, HEAD
from ingot.checkpoint.gguf.gguf_file import GgufFile
from ingot.checkpoint.gguf.gguf_header import GgufTensor
from ingot.checkpoint.packed_config import PackedFormat
from ingot.checkpoint.shard_reader import TensorInfo
from ingot.errors import CheckpointError, to_install

GROUP = 32  # columns of a scale
BITS = {"Q8_0": 8, "Q4_0": 4}  # types whose values are whole multiples of one scale
GGUF_TYPES = {bits: kind for kind, bits in BITS.items()}
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALE = "_scale"
_AT_ONCE = 1 << 20  # values; the package needs several times their bytes
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
# Computed as one product, so that all parts of one must be stored alike.
_PRODUCTS = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))


class GgufWeights:
    """A file's tensors by Hugging Face's names; one that has none keeps its own, for the error that lists it.

    Attributes:
        form: of the layers whose values are kept; None: there are none.
        widened: type → number of the quantized tensors that are not kept.
    """

    def __init__(self, file: GgufFile, config: dict[str, Any]) -> None:
        self._file = file
        self._config = config
        self._own = {_name(own): own for own in file.tensors if own != FREQUENCIES}
        kind, self._kept = _kept(file)
        self.form = None
        if kind is not None:
            self.form = PackedFormat("gguf", BITS[kind], GROUP, symmetric=True, whole_bytes=True)
        types = [one.type.name for name, one in file.tensors.items() if name not in self._kept]
        self.widened = dict(Counter(name for name in types if name not in _DENSE))

    def infos(self) -> dict[str, TensorInfo]:
        """Every tensor, or the two pieces of one that is kept in few bits."""
        return dict(self._infos())

    def _infos(self) -> Iterator[tuple[str, TensorInfo]]:
        for name, own in self._own.items():
            stored = self._file.tensors[own]
            file = stored.path.name
            if own not in self._kept:
                dtype = _DENSE.get(stored.type.name)
                kept = None if dtype else torch.float16  # what the scales are
                yield name, TensorInfo(stored.shape, dtype or torch.float32, file, kept)
                continue
            rows, columns = stored.shape
            yield name, TensorInfo((rows, columns), torch.int8, file)
            yield name + _SCALE, TensorInfo((rows, columns // GROUP), torch.float16, file)

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor or piece; CheckpointError where the ``gguf`` package is needed and missing.

        ``dtype``: of a tensor that is widened; None, and where a value would overflow: fp32.
        """
        own = self._own[name.removesuffix(_SCALE)]
        stored = self._file.tensors[own]
        if own in self._kept:
            scales, values = _pieces(stored, self._file.blocks(own))
            found = scales if name.endswith(_SCALE) else values
        elif stored.type.name in _DENSE:
            found = torch.from_numpy(self._file.blocks(own)).view(_DENSE[stored.type.name])
        else:
            found = self._widened(own, torch.float32 if dtype is None else dtype)
        found = found.reshape(*stored.shape[:-1], -1)
        return self._unturned(own, found).contiguous()

    def _widened(self, own: str, dtype: torch.dtype) -> torch.Tensor:
        """Values [rows, columns] of a quantized tensor, some rows at a time."""
        stored = self._file.tensors[own]
        found = torch.empty(stored.num_rows, stored.shape[-1], dtype=dtype)
        step = max(_AT_ONCE // found.shape[1], 1)
        for start in range(0, len(found), step):
            rows = found[start : start + step]
            values = _dequantized(stored, self._file.blocks(own, start, start + len(rows)))
            rows.copy_(values)
            if dtype != torch.float32 and not torch.equal(rows.isfinite(), values.isfinite()):
                return self._widened(own, torch.float32)
        return found

    def close(self) -> None:
        """Nothing is open between reads."""

    def _unturned(self, own: str, rows: torch.Tensor) -> torch.Tensor:
        """LLaMA's rows of queries and keys: of each head first all first channels of its rotations."""
        found = _LAYER.fullmatch(own)
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        if self._config["model_type"] != "llama" or found is None or found[2] not in heads:
            return rows
        count = self._config[heads[found[2]]]
        if len(rows) % (2 * count):
            seen = f"{own} {list(rows.shape)}"
            what = f"{self._file.path}: rows do not fit the number of heads"
            raise CheckpointError(what, seen=seen, allowed=f"{count} heads", fix="download the file again")
        return rows.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)


def _name(own: str) -> str:
    """Hugging Face's name of a tensor."""
    found = _LAYER.fullmatch(own)
    if found is None or found[2] not in _MODULES:
        return _NAMES.get(own, own)
    return f"model.layers.{found[1]}.{_MODULES[found[2]]}.{found[3]}"


def _kept(file: GgufFile) -> tuple[str | None, frozenset[str]]:
    """The type whose values most layers keep, and their tensors; (None, none) where none does."""
    products: dict[str, list[str]] = {kind: [] for kind in BITS}
    layers = {found[1] for name in file.tensors if (found := _LAYER.fullmatch(name))}
    for layer in layers:
        for parts in _PRODUCTS:
            names = [f"blk.{layer}.{part}.weight" for part in parts]
            if not all(name in file.tensors and len(file.tensors[name].shape) == 2 for name in names):
                continue
            types = {file.tensors[name].type.name for name in names}
            if len(types) == 1 and (kind := types.pop()) in BITS:
                products[kind] += names
    sizes = {kind: sum(file.tensors[name].num_bytes for name in names) for kind, names in products.items()}
    best = max(sizes, key=lambda kind: sizes[kind])
    return (best, frozenset(products[best])) if sizes[best] else (None, frozenset())


def _pieces(stored: GgufTensor, blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [N, groups] fp16 and values [N, K] int8 of Q8_0 or Q4_0."""
    parts = torch.from_numpy(blocks).view(-1, stored.type.bytes)
    scales = parts[:, :2].contiguous().view(torch.float16)
    values = parts[:, 2:]
    if stored.type.name == "Q8_0":
        return scales, values.contiguous().view(torch.int8)
    # Of 32 columns the first half is in the low nibbles, around 8.
    nibbles = torch.cat((values & 15, values >> 4), dim=1)
    return scales, nibbles.to(torch.int8) - 8


def _dequantized(stored: GgufTensor, blocks: np.ndarray) -> torch.Tensor:
    """fp32 values of rows of blocks."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"reading {stored.type.name} tensors of GGUF files needs the package gguf",
            fix=f"{to_install('gguf')} (or pip install gguf)",
        ) from error
    with np.errstate(all="ignore"):  # what is not finite is refused by whoever reads it
        return torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType(stored.type.id)))
