"""MiniGPT-4's official files, put together by published names: what an engine of pictures is compared with.

This is a second list of the names of EVA-ViT, Q-Former, ``ln_vision`` and projector, written from the
published classes and not from the weight map of ``models/minigpt4.py``, by which builds read. The LLM's names
are those of a LLaMA.

Sources: the state dicts of LAVIS's ``VisionTransformer`` (eva_vit.py) and ``Blip2Base``'s
``BertLMHeadModel``, and of MiniGPT-4's ``llama_proj``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from ingot.building.source.source_tensors import SourceTensors
from ingot.checkpoint.minigpt4_files import MiniGPT4Files
from ingot.checkpoint.shard_reader import OpenShard, TensorInfo, scan_shard
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError

_ENCODER, _ZEROS = "encoder.", "0"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
Parts = tuple[str, ...]  # names in files, FILE/NAME, whose tensors are concatenated; "0": zeros


def _pair(ours: str, *theirs: str) -> dict[str, Parts]:
    return {f"{ours}.{leaf}": tuple(f"{one}.{leaf}" for one in theirs) for leaf in ("weight", "bias")}


def _bert(ours: str, theirs: str) -> dict[str, Parts]:
    """A layer of the Q-Former; the feed-forward of queries is apart from that of text."""
    own, cross = f"{theirs}.attention", f"{theirs}.crossattention"
    return {
        **_pair(f"{ours}.self_attn.qkv_proj", *(f"{own}.self.{part}" for part in ("query", "key", "value"))),
        **_pair(f"{ours}.self_attn.o_proj", f"{own}.output.dense"),
        **_pair(f"{ours}.self_attn_norm", f"{own}.output.LayerNorm"),
        **_pair(f"{ours}.encoder_attn.q_proj", f"{cross}.self.query"),
        **_pair(f"{ours}.encoder_attn.kv_proj", f"{cross}.self.key", f"{cross}.self.value"),
        **_pair(f"{ours}.encoder_attn.o_proj", f"{cross}.output.dense"),
        **_pair(f"{ours}.encoder_attn_norm", f"{cross}.output.LayerNorm"),
        **_pair(f"{ours}.mlp.up_proj", f"{theirs}.intermediate_query.dense"),
        **_pair(f"{ours}.mlp.down_proj", f"{theirs}.output_query.dense"),
        **_pair(f"{ours}.mlp_norm", f"{theirs}.output_query.LayerNorm"),
    }


_BLOCK = "vit/blocks.#"
_VIT = "encoder.vit.layers.#"
NAMES: Mapping[str, Parts] = {
    "encoder.vit.class_embedding": ("vit/cls_token",),
    "encoder.vit.embed_positions.weight": ("vit/pos_embed",),
    **_pair("encoder.vit.patch_embedding", "vit/patch_embed.proj"),
    **_pair(f"{_VIT}.input_layernorm", f"{_BLOCK}.norm1"),
    f"{_VIT}.self_attn.qkv_proj.weight": (f"{_BLOCK}.attn.qkv.weight",),
    f"{_VIT}.self_attn.qkv_proj.bias": (f"{_BLOCK}.attn.q_bias", _ZEROS, f"{_BLOCK}.attn.v_bias"),
    **_pair(f"{_VIT}.self_attn.o_proj", f"{_BLOCK}.attn.proj"),
    **_pair(f"{_VIT}.post_attention_layernorm", f"{_BLOCK}.norm2"),
    **_pair(f"{_VIT}.mlp.up_proj", f"{_BLOCK}.mlp.fc1"),
    **_pair(f"{_VIT}.mlp.down_proj", f"{_BLOCK}.mlp.fc2"),
    "encoder.qformer.queries": ("qformer/query_tokens",),
    **_pair("encoder.qformer.norm", "qformer/Qformer.bert.embeddings.LayerNorm"),
    **_bert("encoder.qformer.layers.#", "qformer/Qformer.bert.encoder.layer.#"),
    **_pair("encoder.projector", "projector/llama_proj"),
}
_LN_VISION = {"encoder.ln_vision.weight": "ln_vision.weight", "encoder.ln_vision.bias": "ln_vision.bias"}


class PictureSource:
    """Tensors by our modules' names: the encoder's from the files beside the LLM's."""

    def __init__(self, files: MiniGPT4Files, llm: SourceTensors) -> None:
        self._files = files
        self._llm = llm
        self._open = OpenShard()
        self._infos: dict[str, TensorInfo] = {}
        for part, (path, inner) in files.parts.items():
            self._infos |= {f"{part}/{name}": info for name, info in scan_shard(path, inner).items()}

    @classmethod
    def open(
        cls, checkpoint: Path | MiniGPT4Files, config: DecoderConfig, layers: tuple[int, ...] | None
    ) -> Self:
        """Of a YAML file or the files that it names; reads no tensor."""
        files = checkpoint if isinstance(checkpoint, MiniGPT4Files) else MiniGPT4Files.read(checkpoint)
        return cls(files, SourceTensors.open(files.llm, config, layers))

    def read(self, module: str, leaf: str) -> torch.Tensor:
        """What one of our tensors holds before any rounding, on the CPU."""
        name = f"{module}.{leaf}"
        if not name.startswith(_ENCODER):
            return self._llm.read(module, leaf)
        if name in _LN_VISION:
            return self._ln_vision(_LN_VISION[name])
        found = _LAYER.search(name)
        parts = NAMES.get(_LAYER.sub(".layers.#.", name))
        if parts is None:
            raise CheckpointError("no source is known of a tensor", seen=name)
        named = [part.replace("#", found[1] if found else "") for part in parts]
        read = [None if one == _ZEROS else self._tensor(one) for one in named]
        first = next(one for one in read if one is not None)
        joined = torch.cat([torch.zeros_like(first) if one is None else one for one in read])
        match name:
            case "encoder.vit.embed_positions.weight":
                grid = self._files.image_size // self._infos["vit/patch_embed.proj.weight"].shape[-1]
                return _positions(joined[0], grid)
            case "encoder.vit.class_embedding":
                return joined.flatten()
            case "encoder.qformer.queries":
                return joined[0]
        return joined

    def _ln_vision(self, name: str) -> torch.Tensor:
        """BLIP-2's, or the projector's own; where no file has it, the original leaves it as it was made."""
        for part in ("qformer", "projector"):
            if f"{part}/{name}" in self._infos:
                return self._tensor(f"{part}/{name}")
        width = self._infos["vit/cls_token"].shape[-1]
        return torch.ones(width) if name.endswith("weight") else torch.zeros(width)

    def _tensor(self, name: str) -> torch.Tensor:
        part, _, own = name.partition("/")
        if name not in self._infos:
            raise CheckpointError(
                "the checkpoint lacks a tensor that the engine holds",
                seen=f"{own} of {part}",
                field="source",
                fix="`source=FILE.yaml`, of the files that the engine was built from",
            )
        return self._open.read(*self._files.parts[part], own)

    def is_packed(self, module: str) -> bool:
        """As of ``Source``; the encoder's weights are never packed."""
        return not module.startswith(_ENCODER) and self._llm.is_packed(module)

    def input_scale(self, module: str) -> float | None:
        return None if module.startswith(_ENCODER) else self._llm.input_scale(module)

    def close(self) -> None:
        self._llm.close()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _positions(table: torch.Tensor, grid: int) -> torch.Tensor:
    """[1 + n², size] → [1 + grid², size]: class token, and the square resized as in the original, fp32."""
    side = math.isqrt(len(table) - 1)
    if side == grid:
        return table
    square = table[1:].float().T.reshape(1, -1, side, side)
    found = torch.nn.functional.interpolate(square, (grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([table[:1].float(), found.reshape(-1, grid * grid).T])
