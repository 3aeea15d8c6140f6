"""Small checkpoints, and the bugs that live in files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "model.safetensors"
NO_THOUGHTS = (  # thinking is switched off: the prompt closes the block
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INST = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def write_chat_model(folder: Path) -> None:
    """A Qwen v1 of two layers with random weights and a vocabulary of bytes."""
    write_tiny(folder, seed=1)


def write_llama(folder: Path) -> None:
    """The language model of models/pocket-vision, with a chat template that writes BOS."""
    shutil.copytree(ROOT / "models" / "pocket-vision" / "llama", folder)
    (folder / "chat_template.jinja").write_text(INST, encoding="utf-8")


def exchange_branches(folder: Path) -> None:
    """A converter that takes gate for up, and up for gate."""

    def renamed(name: str) -> str:
        return name.replace(".w1.", ".w.").replace(".w2.", ".w1.").replace(".w.", ".w2.")

    _rewrite(folder, lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()})


def rotate_down_inputs(folder: Path) -> None:
    """The offline half of a rotation of the MLP's hidden channels: down · H. The engine that runs it would
    have to multiply the activation by H, and nothing in the checkpoint says so.
    """

    def rotated(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if name.endswith("mlp.c_proj.weight"):
                size = tensor.shape[1]
                random = torch.randn(
                    size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
                )
                orthogonal = torch.linalg.qr(random)[0]
                tensors[name] = (tensor.double() @ orthogonal).to(tensor.dtype)
        return tensors

    _rewrite(folder, rotated)


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(change(tensors), folder / WEIGHTS)
