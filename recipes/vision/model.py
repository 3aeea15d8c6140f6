"""MiniGPT-4 in plain PyTorch: EVA ViT, BLIP-2's Q-Former, a projection and LLaMA, at any size.

Modules have the names of the official files, so a state dict is those files' tensors under four prefixes
(``visual_encoder.``, ``Qformer.`` with its neighbours, ``llama_proj.`` and ``llama_model.``).

    model = MiniGPT4(Shape())
    model.encode(pixels)                    # [pictures, queries, hidden]: what LLaMA reads
    model.logits(before, embeds, after)     # [rows, positions, vocabulary]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MLP_RATIO = 4.3637  # EVA's


@dataclass(frozen=True)
class Shape:
    """Sizes. The ViT's heads have 88 channels and its feed-forward 768, as an eighth of EVA-ViT-g's."""

    image: int = 112
    patch: int = 14
    vit_width: int = 176
    vit_heads: int = 2
    vit_depth: int = 4
    queries: int = 16
    qformer_hidden: int = 128
    qformer_heads: int = 4
    qformer_layers: int = 4
    qformer_inner: int = 512
    hidden: int = 256
    heads: int = 4
    layers: int = 4
    inner: int = 512
    vocab: int = 512

    @property
    def patches(self) -> int:
        """Patches of a picture, without the class token."""
        return (self.image // self.patch) ** 2


def _attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """Attention over [rows, positions, heads * channels], heads side by side."""
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class VitAttention(nn.Module):
    """Self-attention with a bias on queries and values and none on keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width]."""
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        query, key, value = F.linear(x, self.qkv.weight, bias).chunk(3, -1)
        out: Tensor = self.proj(_attend(query, key, value, self.heads))
        return out


class VitMlp(nn.Module):
    """Feed-forward with the exact GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = int(width * MLP_RATIO)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width]."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class VitBlock(nn.Module):
    """Pre-norm block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = VitAttention(width, heads), VitMlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width]."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class EvaVit(nn.Module):
    """Patches and a class token, learned absolute positions, no norm at the end."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.vit_width
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, shape.patches + 1, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, shape.patch, shape.patch)})
        self.blocks = nn.ModuleList(VitBlock(width, shape.vit_heads) for _ in range(shape.vit_depth))

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [pictures, 3, image, image] -> [pictures, 1 + patches, width]."""
        patches = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(pixels), -1, -1), patches), 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return x


def _bert_attention(hidden: int, width: int) -> nn.ModuleDict:
    own = nn.ModuleDict(
        {
            "query": nn.Linear(hidden, hidden),
            "key": nn.Linear(width, hidden),
            "value": nn.Linear(width, hidden),
        }
    )
    return nn.ModuleDict({"self": own, "output": _bert_output(hidden, hidden)})


def _bert_output(inner: int, hidden: int) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inner, hidden), "LayerNorm": nn.LayerNorm(hidden, eps=1e-12)})


class QformerLayer(nn.Module):
    """Post-norm: queries attend to each other and, in every second layer, to the picture."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        hidden, self.heads = shape.qformer_hidden, shape.qformer_heads
        self.attention = _bert_attention(hidden, hidden)
        self.crossattention = _bert_attention(hidden, shape.vit_width) if index % 2 == 0 else None
        self.intermediate_query = nn.ModuleDict({"dense": nn.Linear(hidden, shape.qformer_inner)})
        self.output_query = _bert_output(shape.qformer_inner, hidden)

    def forward(self, x: Tensor, vision: Tensor) -> Tensor:
        """Queries [pictures, queries, hidden] and the ViT's tokens [pictures, tokens, width]."""
        x = self._attention(self.attention, x, x)
        if self.crossattention is not None:
            x = self._attention(self.crossattention, x, vision)
        return _close(self.output_query, F.gelu(self.intermediate_query["dense"](x)), x)

    def _attention(self, parts: nn.ModuleDict, x: Tensor, source: Tensor) -> Tensor:
        query, key, value = parts["self"].children()
        found = _attend(query(x), key(source), value(source), self.heads)
        return _close(parts["output"], found, x)


def _close(parts: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """BERT's output: a product, the residual, then the norm."""
    out: Tensor = parts["LayerNorm"](parts["dense"](x) + residual)  # type: ignore[index]
    return out


class Rotary(nn.Module):
    """Sines and cosines of positions, halves split as Hugging Face does.

    ``rounded``: to fp16, as the original's tables are, which are made while its LLaMA is loaded in fp16.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rounded = False
        rates = 10000.0 ** (-torch.arange(0, channels, 2).float() / channels)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, channels] in fp32."""
        rates: Tensor = self.rates  # type: ignore[assignment]
        angles = torch.arange(length, device=rates.device).float()[:, None] * rates
        angles = torch.cat((angles, angles), -1)
        cosine, sine = angles.cos(), angles.sin()
        return (cosine.half().float(), sine.half().float()) if self.rounded else (cosine, sine)


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    cosine, sine = (turn.to(x.dtype) for turn in turns)
    return x * cosine + torch.cat((-second, first), -1) * sine


class RmsNorm(nn.Module):
    """LLaMA's norm, in fp32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., size]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, 1e-6)


class LlamaLayer(nn.Module):
    """Rotary attention and a SiLU-gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, self.heads = shape.hidden, shape.heads
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden), RmsNorm(hidden)
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(hidden, hidden, bias=False) for name in names})
        sizes = {"gate_proj": (hidden, shape.inner), "up_proj": (hidden, shape.inner)}
        sizes["down_proj"] = (shape.inner, hidden)
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states [rows, positions, hidden]."""
        parts, normed = self.self_attn, self.input_layernorm(x)
        query, key, value = (
            parts[name](normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        found = F.scaled_dot_product_attention(
            _rotate(query, turns), _rotate(key, turns), value, is_causal=True
        )
        x = x + parts["o_proj"](found.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        out: Tensor = x + self.mlp["down_proj"](gated)
        return out


class Llama(nn.Module):
    """The decoder without its head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden)
        self.rotary = Rotary(shape.hidden // shape.heads)

    def forward(self, embeds: Tensor) -> Tensor:
        """Embeddings [rows, positions, hidden] -> normed hidden states."""
        turns = self.rotary(embeds.shape[1])
        for layer in self.layers:
            embeds = layer(embeds, turns)
        out: Tensor = self.norm(embeds)
        return out


class MiniGPT4(nn.Module):
    """The whole model; its modules are named as in the official files."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.visual_encoder = EvaVit(shape)
        self.ln_vision = nn.LayerNorm(shape.vit_width, eps=1e-5)
        self.query_tokens = nn.Parameter(torch.zeros(1, shape.queries, shape.qformer_hidden))
        layers = nn.ModuleList(QformerLayer(shape, index) for index in range(shape.qformer_layers))
        norm = nn.ModuleDict({"LayerNorm": nn.LayerNorm(shape.qformer_hidden, eps=1e-12)})
        bert = nn.ModuleDict({"embeddings": norm, "encoder": nn.ModuleDict({"layer": layers})})
        self.Qformer = nn.ModuleDict({"bert": bert})
        self.llama_proj = nn.Linear(shape.qformer_hidden, shape.hidden)
        head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.llama_model = nn.ModuleDict({"model": Llama(shape), "lm_head": head})
        self._initialize()

    def _initialize(self) -> None:
        layers = {"vis": self.shape.vit_depth, "Qfo": 1, "lla": self.shape.layers}
        for name, parameter in self.named_parameters():
            if "embed_tokens" in name or name.endswith(("cls_token", "pos_embed")):
                nn.init.normal_(parameter, std=0.02)
            elif name == "query_tokens":
                nn.init.normal_(parameter, std=0.5)
            elif parameter.dim() > 1:
                std = parameter[0].numel() ** -0.5
                if name.endswith(("attn.proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * layers[name[:3]])
                nn.init.normal_(parameter, std=std)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def vision(self, pixels: Tensor) -> Tensor:
        """Normalized pixels -> the ViT's tokens after ``ln_vision``, [pictures, 1 + patches, width]."""
        out: Tensor = self.ln_vision(self.visual_encoder(pixels))
        return out

    def ask_queries(self, vision: Tensor) -> Tensor:
        """The Q-Former's last hidden states, [pictures, queries, qformer_hidden]."""
        bert = self.Qformer["bert"]
        x = bert["embeddings"]["LayerNorm"](self.query_tokens).expand(len(vision), -1, -1)  # type: ignore[index]
        for layer in bert["encoder"]["layer"]:  # type: ignore[index]
            x = layer(x, vision)
        return x

    def encode(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [pictures, 3, image, image] -> embeddings [pictures, queries, hidden]."""
        out: Tensor = self.llama_proj(self.ask_queries(self.vision(pixels)))
        return out

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids."""
        out: Tensor = self.llama_model["model"].embed_tokens(ids)  # type: ignore[operator]
        return out

    def hidden(self, embeds: Tensor) -> Tensor:
        """Embeddings of a whole sequence -> normed hidden states."""
        out: Tensor = self.llama_model["model"](embeds)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, in fp32."""
        out: Tensor = self.llama_model["lm_head"](hidden)
        return out.float()

    def logits(self, before: Tensor, embeds: Tensor, after: Tensor) -> Tensor:
        """Ids [rows, n], a picture's embeddings [rows, queries, hidden], ids [rows, m] -> all logits."""
        return self.head(self.hidden(torch.cat((self.embed(before), embeds, self.embed(after)), 1)))
