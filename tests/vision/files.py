"""A tiny MiniGPT-4 in the official layout, of random weights that Hugging Face's BLIP-2 classes hold.

Owns the files and the classes' own outputs. Hugging Face's names are turned into the official ones here, by a
list of their own.

    tiny = write_files(tmp_path, TINY)
    expected = tiny.encode(pixels)          # by Hugging Face's classes and plain PyTorch
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    Blip2QFormerConfig,
    Blip2QFormerModel,
    Blip2VisionConfig,
    Blip2VisionModel,
    LlamaForCausalLM,
)

from tests.tiny_models import save_model, tiny_config

_VIT = (
    (r"^embeddings\.class_embedding$", "cls_token"),
    (r"^embeddings\.position_embedding$", "pos_embed"),
    (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"^encoder\.layers\.", "blocks."),
    (r"\.self_attn\.qkv\.", ".attn.qkv."),
    (r"\.self_attn\.projection\.", ".attn.proj."),
    (r"\.layer_norm([12])\.", r".norm\1."),
)
_QFORMER = (
    (r"^layernorm\.", "Qformer.bert.embeddings.LayerNorm."),
    (r"^encoder\.layer\.", "Qformer.bert.encoder.layer."),
    (r"attention\.attention\.", "attention.self."),
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; ``queries`` 0: the Llama-2 variant."""

    side: int = 28
    patch: int = 7
    width: int = 24
    heads: int = 3
    depth: int = 2
    inner: int = 40
    queries: int = 5
    qformer_width: int = 16
    qformer_heads: int = 2
    qformer_layers: int = 3
    qformer_inner: int = 24


TINY = Shape()
SHAPES = {
    "tiny": TINY,
    "wider": Shape(side=42, patch=14, width=32, heads=4, depth=1, qformer_width=32, qformer_layers=1),
    "deeper": Shape(side=21, patch=7, width=16, heads=2, depth=4, queries=3, qformer_layers=4),
}
LLAMA2 = Shape(queries=0)


@dataclass
class Tiny:
    """The files, and the modules whose weights they hold."""

    file: Path
    vit: Blip2VisionModel
    ln_vision: torch.nn.LayerNorm
    qformer: Blip2QFormerModel | None
    queries: torch.Tensor
    projector: torch.nn.Linear
    llm: LlamaForCausalLM

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, 3, side, side] → [N, positions, hidden_size of the LLM]."""
        seen = self.ln_vision(self.vit.encoder(self.vit.embeddings(pixels)).last_hidden_state)
        if self.qformer is None:
            found = seen[:, 1:].reshape(len(pixels), -1, 4 * seen.shape[-1])
        else:
            asked = self.queries.expand(len(pixels), -1, -1)
            found = self.qformer(query_embeds=asked, encoder_hidden_states=seen).last_hidden_state
        return self.projector(found)

    @torch.no_grad()
    def logits(self, before: list[int], pixels: torch.Tensor, after: list[int]) -> torch.Tensor:
        """Of every position of one sequence [T, vocab_size]: ids, a picture [3, side, side], ids."""
        embed = self.llm.get_input_embeddings()
        first, last = (embed(torch.tensor(ids, dtype=torch.int64)) for ids in (before, after))
        rows = torch.cat([first, self.encode(pixels[None])[0], last])
        return self.llm(inputs_embeds=rows[None]).logits[0]


def write_files(folder: Path, shape: Shape = TINY, seed: int = 0) -> Tiny:
    """Write the YAML file and what it names; biases of keys are zero, and a block more than runs is there."""
    vit = Blip2VisionModel(_vision(shape)).eval()
    _randomize(vit, seed)
    for layer in vit.encoder.layers:
        layer.self_attn.qkv.bias.data[shape.width : 2 * shape.width] = 0
    norm = torch.nn.LayerNorm(shape.width, eps=1e-5)
    llm = save_model(tiny_config("llama"), folder / "llama", seed)
    assert isinstance(llm, LlamaForCausalLM)
    inputs = shape.qformer_width if shape.queries else 4 * shape.width
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(1, max(shape.queries, 1), shape.qformer_width, generator=generator)
    qformer = None
    if shape.queries:
        qformer = Blip2QFormerModel(_queries(shape)).eval()
        _randomize(qformer, seed + 1)
        _randomize(norm, seed + 2)
    projector = torch.nn.Linear(inputs, llm.config.hidden_size)
    _randomize(projector, seed + 3)
    torch.save(_vit_state(vit, shape), folder / "vit.pth")
    torch.save(
        {"model": {f"llama_proj.{n}": t for n, t in projector.state_dict().items()}}, folder / "projector.pth"
    )
    named: dict[str, Any] = {
        "model": "minigpt4",
        "llm": "llama",
        "vit": "vit.pth",
        "projector": "projector.pth",
    }
    named |= {"image_size": shape.side, "vit_depth": shape.depth, "vit_heads": shape.heads}
    if qformer is not None:
        torch.save({"model": _qformer_state(qformer, queries, norm)}, folder / "qformer.pth")
        named |= {"qformer": "qformer.pth", "qformer_heads": shape.qformer_heads}
    file = folder / "minigpt4.yaml"
    file.write_text(yaml.safe_dump(named))
    return Tiny(file, vit, norm, qformer, queries, projector, llm)


def _randomize(module: torch.nn.Module, seed: int) -> None:
    """Weights of unit gain, and norms and biases away from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        vector = 0.3 * noise + (0.0 if name.endswith("bias") else 1.0)
        weight.data.copy_(vector if weight.dim() == 1 else noise / weight[0].numel() ** 0.5)


def pixels(shape: Shape, count: int, seed: int = 7) -> torch.Tensor:
    """[count, 3, side, side], about as normalised pictures are spread."""
    return torch.randn(count, 3, shape.side, shape.side, generator=torch.Generator().manual_seed(seed))


def _vision(shape: Shape) -> Blip2VisionConfig:
    return Blip2VisionConfig(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        image_size=shape.side,
        patch_size=shape.patch,
    )


def _queries(shape: Shape) -> Blip2QFormerConfig:
    return Blip2QFormerConfig(
        hidden_size=shape.qformer_width,
        num_attention_heads=shape.qformer_heads,
        num_hidden_layers=shape.qformer_layers,
        intermediate_size=shape.qformer_inner,
        encoder_hidden_size=shape.width,
        cross_attention_frequency=2,
    )


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for pattern, new in pairs:
        name = re.sub(pattern, new, name)
    return name


def _vit_state(vit: Blip2VisionModel, shape: Shape) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in vit.state_dict().items():
        own = _renamed(name, _VIT)
        if own.startswith("post_layernorm"):
            continue
        if own.endswith("attn.qkv.bias"):
            query, _, value = tensor.chunk(3)
            stem = own.removesuffix("qkv.bias")
            found |= {f"{stem}q_bias": query.clone(), f"{stem}v_bias": value.clone()}
        else:
            found[own] = tensor
    last = f"blocks.{shape.depth - 1}."
    more = {n.replace(last, f"blocks.{shape.depth}."): t + 1 for n, t in found.items() if n.startswith(last)}
    return found | more | {"norm.weight": torch.ones(shape.width), "head.weight": torch.ones(4, shape.width)}


def _qformer_state(
    qformer: Blip2QFormerModel, queries: torch.Tensor, norm: torch.nn.LayerNorm
) -> dict[str, torch.Tensor]:
    found = {_renamed(name, _QFORMER): tensor for name, tensor in qformer.state_dict().items()}
    size = queries.shape[-1]
    text = "Qformer.bert.encoder.layer.0.{}.dense.weight"
    idle = {text.format(name): torch.ones(size, size) for name in ("intermediate", "output")}
    idle |= {
        "Qformer.bert.embeddings.position_ids": torch.arange(9)[None],
        "t5_proj.weight": torch.ones(3, size),
    }
    idle |= {"Qformer.cls.predictions.bias": torch.ones(7)}
    return (
        found | idle | {"query_tokens": queries} | {f"ln_vision.{n}": t for n, t in norm.state_dict().items()}
    )
