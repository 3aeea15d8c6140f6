"""A Qwen v1 in plain PyTorch, as old code would have it: no cache, and names of its own library.

Stands alone: run as a script beside a copy of ingot/measure/align/trace.py. Knows no Ingot.

    python old_qwen.py CHECKPOINT OUT ID ID ID ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

HIDDEN, HEADS, INNER, LAYERS, VOCAB = 32, 2, 48, 2, 464


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.c_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        length = x.shape[1]
        q, k, v = self.c_attn(x).view(1, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2)), None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(HIDDEN, INNER, bias=False)
        self.c_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.w1(x) * F.silu(self.w2(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = Norm(), Attention(), Norm(), Mlp()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = x + self.attn(self.ln_1(x))[0]
        return (x + self.mlp(self.ln_2(x)),)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = Norm()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.h:
            (x,) = block(x)
        return self.ln_f(x)


class OldQwen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = Stack()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.transformer(ids))


def turn(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in half-split order, [1, heads, length, head_dim]."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[2]).float(), 10000.0 ** -(torch.arange(half).float() / half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def load(folder: str) -> OldQwen:
    """The checkpoint's weights in fp32."""
    model = OldQwen()
    weights = {name: w.float() for name, w in load_file(Path(folder) / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model.eval()


if __name__ == "__main__":
    sys.modules["ingot"] = None  # type: ignore[assignment]  # any import of it fails
    from trace_copy import run_steps, trace  # type: ignore[import-not-found]

    old = load(sys.argv[1])
    with trace(old, sys.argv[2], prompt="hello"):
        run_steps(old, [int(i) for i in sys.argv[3:]], 3)
