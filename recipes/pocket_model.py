"""The model that is trained: Qwen v1's decoder under Qwen v1's tensor names, and greedy generation.

RMSNorm, half-split RoPE, fused q/k/v with bias, c_proj(w1(x) * silu(w2(x))), up to the training length,
without long-context scaling.

    PocketModel(PocketShape()).logits(ids)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6


@dataclass(frozen=True)
class PocketShape:
    """Sizes of the model. ``branch`` is the MLP's width, half of Qwen v1's ``intermediate_size``."""

    vocab: int = 3072
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    branch: int = 640
    length: int = 1024

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPS)


def rotary_tables(shape: PocketShape) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, head_dim], base 10000; the second half of the channels repeats the first."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(shape.length).float(), 10000.0**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.shape = shape
        self.c_attn = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.c_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys and values, each [batch, heads, tokens, head_dim]."""
        batch, tokens, _ = x.shape
        fused = self.c_attn(x).view(batch, tokens, 3, self.shape.heads, self.shape.head_dim)
        q, k, v = fused.permute(2, 0, 3, 1, 4)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype), v

    def output(self, mixed: Tensor) -> Tensor:
        """Heads joined and projected back to [batch, tokens, hidden]."""
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden, shape.branch, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.branch, bias=False)
        self.c_proj = nn.Linear(shape.branch, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.w1(x) * F.silu(self.w2(x)))


class _Block(nn.Module):
    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.ln_1 = _Norm(shape.hidden)
        self.attn = _Attention(shape)
        self.ln_2 = _Norm(shape.hidden)
        self.mlp = _Mlp(shape)


class _Cache:
    """Keys and values of every layer, [batch, heads, room, head_dim], and each row's length."""

    def __init__(self, shape: PocketShape, lengths: Tensor, room: int) -> None:
        sizes = (len(lengths), shape.heads, room, shape.head_dim)
        self.keys = [torch.zeros(sizes, device=lengths.device) for _ in range(shape.layers)]
        self.values = [torch.zeros(sizes, device=lengths.device) for _ in range(shape.layers)]
        self.lengths = lengths
        self.rows = torch.arange(len(lengths), device=lengths.device)


class PocketModel(nn.Module):
    """Decoder-only transformer; ``state_dict`` has the names of a Qwen v1 checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.shape = shape
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(shape.vocab, shape.hidden),
                "h": nn.ModuleList(_Block(shape) for _ in range(shape.layers)),
                "ln_f": _Norm(shape.hidden),
            }
        )
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Normed hidden states [batch, tokens, hidden] of right-padded ``ids`` [batch, tokens]."""
        return self._hidden(ids, None)

    def logits(self, ids: Tensor) -> Tensor:
        """Logits [batch, tokens, vocab] of ``ids`` [batch, tokens]."""
        return self.lm_head(self(ids))

    def _blocks(self) -> list[_Block]:
        return [block for block in cast(nn.ModuleList, self.transformer["h"]) if isinstance(block, _Block)]

    def _hidden(self, ids: Tensor, cache: _Cache | None) -> Tensor:
        x = self.transformer["wte"](ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer, block in enumerate(self._blocks()):
            q, k, v = block.attn.project(block.ln_1(x), cos, sin)
            if cache is not None:
                cache.keys[layer][:, :, : ids.shape[1]] = k
                cache.values[layer][:, :, : ids.shape[1]] = v
            x = x + block.attn.output(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            x = x + block.mlp(block.ln_2(x))
        return self.transformer["ln_f"](x)

    def _step(self, ids: Tensor, cache: _Cache) -> Tensor:
        """Hidden states [batch, 1, hidden] of one more token a row, ``ids`` [batch]."""
        at = cache.lengths
        x = self.transformer["wte"](ids[:, None])
        cos, sin = self.cos[at][:, None, None], self.sin[at][:, None, None]
        room = torch.arange(cache.keys[0].shape[2], device=ids.device)
        seen = (room[None] <= at[:, None])[:, None, None]  # [batch, 1, 1, room]
        for layer, block in enumerate(self._blocks()):
            q, k, v = block.attn.project(block.ln_1(x), cos, sin)
            cache.keys[layer][cache.rows, :, at] = k[:, :, 0]
            cache.values[layer][cache.rows, :, at] = v[:, :, 0]
            mixed = F.scaled_dot_product_attention(q, cache.keys[layer], cache.values[layer], attn_mask=seen)
            x = x + block.attn.output(mixed)
            x = x + block.mlp(block.ln_2(x))
        cache.lengths = at + 1
        return self.transformer["ln_f"](x)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], max_new: int, stop: int) -> list[list[int]]:
        """Greedy ids for each prompt, up to ``max_new`` or the id ``stop`` (not included)."""
        device = self.cos.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = int(lengths.max())
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        cache = _Cache(self.shape, lengths, min(longest + max_new, self.shape.length))
        hidden = self._hidden(ids.to(device), cache)[cache.rows, lengths - 1]
        produced = []
        for _ in range(cache.keys[0].shape[2] - longest):
            token = self.lm_head(hidden).argmax(-1)
            produced.append(token)
            if bool((torch.stack(produced) == stop).any(0).all()):
                break
            hidden = self._step(token, cache)[:, 0]
        rows = torch.stack(produced, dim=1).tolist()
        return [row[: row.index(stop)] if stop in row else row for row in rows]
