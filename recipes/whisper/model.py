"""The model that is trained: Whisper under Hugging Face's tensor names, and greedy decoding.

Pre-norm layers, GELU, keys without bias, sinusoids in the encoder; and two helpers of training alone: a guess
of the phoneme in each encoder position, and where one head of a layer looks.

    model = PocketWhisper(Shape()); logits = model(features, ids).logits
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.whisper.utterances import PHONES


@dataclass(frozen=True)
class Shape:
    """Sizes of the model: 3.8 million parameters."""

    vocab: int = 3072
    size: int = 192
    heads: int = 3
    inner: int = 512
    encoder_layers: int = 5
    decoder_layers: int = 2
    mels: int = 80
    source: int = 1500
    target: int = 448


class Found(NamedTuple):
    """Logits [B, L, vocab], phoneme logits [B, positions, PHONES], and the attention of head 0 in the first
    layer (``behind``) and in the last one (``ahead``), each [B, L, positions].
    """

    logits: Tensor
    phones: Tensor
    behind: Tensor
    ahead: Tensor


def sinusoids(length: int, size: int) -> Tensor:
    """Sines, then cosines, of geometrically spaced periods from 2π to 20000π: [length, size]."""
    scale = torch.exp(-math.log(10000) / (size // 2 - 1) * torch.arange(size // 2))
    angles = torch.arange(length)[:, None] * scale[None]
    return torch.cat((angles.sin(), angles.cos()), 1)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj = nn.Linear(shape.size, shape.size)
        self.k_proj = nn.Linear(shape.size, shape.size, bias=False)
        self.v_proj = nn.Linear(shape.size, shape.size)
        self.out_proj = nn.Linear(shape.size, shape.size)

    def split(self, x: Tensor) -> Tensor:
        """[B, N, size] → [B, heads, N, channels]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, source: Tensor, causal: bool = False) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(source)), self.split(self.v_proj(source))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def looks(self, x: Tensor, source: Tensor) -> Tensor:
        """Attention of head 0: [B, queries, keys]."""
        channels = x.shape[-1] // self.heads
        q, k = self.q_proj(x)[..., :channels], self.k_proj(source)[..., :channels]
        return (q @ k.transpose(1, 2)).float().mul(channels**-0.5).softmax(-1)


class _Layer(nn.Module):
    def __init__(self, shape: Shape, cross: bool) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.self_attn_layer_norm = nn.LayerNorm(shape.size)
        if cross:
            self.encoder_attn = _Attention(shape)
            self.encoder_attn_layer_norm = nn.LayerNorm(shape.size)
        self.fc1 = nn.Linear(shape.size, shape.inner)
        self.fc2 = nn.Linear(shape.inner, shape.size)
        self.final_layer_norm = nn.LayerNorm(shape.size)

    def attended(self, x: Tensor, causal: bool) -> Tensor:
        """With what this sequence says."""
        normed = self.self_attn_layer_norm(x)
        return x + self.self_attn(normed, normed, causal)

    def cross_attended(self, x: Tensor, source: Tensor) -> Tensor:
        """Adds the attention to the encoder's outputs."""
        return x + self.encoder_attn(self.encoder_attn_layer_norm(x), source)

    def fed(self, x: Tensor) -> Tensor:
        """Behind the MLP."""
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


def _typed(layers: nn.ModuleList) -> list[_Layer]:
    return [layer for layer in layers if isinstance(layer, _Layer)]


class _Encoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(shape.mels, shape.size, 3, padding=1)
        self.conv2 = nn.Conv1d(shape.size, shape.size, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(shape.source, shape.size)
        self.layers = nn.ModuleList(_Layer(shape, cross=False) for _ in range(shape.encoder_layers))
        self.layer_norm = nn.LayerNorm(shape.size)
        self.embed_positions.weight = nn.Parameter(sinusoids(shape.source, shape.size), requires_grad=False)

    def forward(self, features: Tensor, starts: Tensor | None = None) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(features)))).transpose(1, 2)
        places = torch.arange(x.shape[1], device=x.device)
        x = x + self.embed_positions.weight[places if starts is None else starts[:, None] + places]
        for layer in _typed(self.layers):
            x = layer.fed(layer.attended(x, causal=False))
        return self.layer_norm(x)


class _Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.size)
        self.embed_positions = nn.Embedding(shape.target, shape.size)
        self.layers = nn.ModuleList(_Layer(shape, cross=True) for _ in range(shape.decoder_layers))
        self.layer_norm = nn.LayerNorm(shape.size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.embed_positions.weight = nn.Parameter(sinusoids(shape.target, shape.size) * 0.02)

    def forward(self, ids: Tensor, source: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Hidden states, and the input of each layer's attention to the encoder."""
        x = self.embed_tokens(ids) + self.embed_positions.weight[: ids.shape[1]]
        asking = []
        for layer in _typed(self.layers):
            asking.append(layer.attended(x, causal=True))
            x = layer.fed(layer.cross_attended(asking[-1], source))
        return self.layer_norm(x), asking


class PocketWhisper(nn.Module):
    """Tensors have the names of a checkpoint behind "model."; ``phones`` is not exported."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.encoder, self.decoder = _Encoder(shape), _Decoder(shape)
        self.phones = nn.Linear(shape.size, PHONES)

    def forward(self, features: Tensor, ids: Tensor, starts: Tensor | None = None) -> Found:
        """features: [B, mels, frames], at most 2 * ``source`` frames; ids: [B, L]; starts: [B], the first
        position of each window, 0 by default.
        """
        source = self.encoder(features, starts)
        hidden, asking = self.decoder(ids, source)
        layers = _typed(self.decoder.layers)
        behind, ahead = (
            layer.encoder_attn.looks(layer.encoder_attn_layer_norm(x), source)
            for layer, x in ((layers[0], asking[0]), (layers[-1], asking[-1]))
        )
        return Found(self.logits(hidden), self.phones(source), behind, ahead)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocab]; the embedding is tied."""
        return F.linear(hidden, self.decoder.embed_tokens.weight)

    @torch.no_grad()
    def generate(
        self, features: Tensor, prompt: list[int], end: int, most: int, first_time: int | None = None
    ) -> list[list[int]]:
        """Greedy ids behind ``prompt`` for each of features [B, mels, frames], without ``end``.

        Args:
            first_time: the first token is a timestamp, of which this is 0.00; None: any token.
        """
        source = self.encoder(features)
        ids = torch.tensor([prompt], device=features.device).repeat(len(features), 1)
        ended = torch.zeros(len(features), dtype=torch.bool, device=features.device)
        for step in range(most):
            logits = self.logits(self.decoder(ids, source)[0][:, -1])
            if step == 0 and first_time is not None:
                logits[:, :first_time] = -torch.inf
            token = torch.where(ended, end, logits.argmax(-1))
            ids = torch.cat((ids, token[:, None]), 1)
            ended |= token == end
            if bool(ended.all()):
                break
        rows = ids[:, len(prompt) :].tolist()
        return [row[: row.index(end)] if end in row else row for row in rows]
