"""The pocket model's function with three channels behind each norm, and of each MLP, 30 times louder.

folder = write_loud(tmp_path / "loud")
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "models" / "pocket-chat"
LOUD, GAIN = [3, 77, 200], 30.0
LINEAR = ("c_attn.weight", "attn.c_proj.weight", "w1.weight", "w2.weight", "mlp.c_proj.weight")


def write_loud(folder: Path) -> Path:
    """A checkpoint of it; returns the folder."""
    return write_pocket(folder, louder(load_file(POCKET / "model.safetensors")))


def write_pocket(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The pocket model with other weights; returns the folder."""
    folder.mkdir(parents=True)
    for path in POCKET.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def louder(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same function: norms' weights are multiplied, and columns that read them divided."""
    found = {name: tensor.float() for name, tensor in tensors.items()}
    for name, tensor in found.items():
        if name.endswith(("ln_1.weight", "ln_2.weight")):
            tensor[LOUD] *= GAIN
        elif name.endswith(("c_attn.weight", "w1.weight", "w2.weight")):
            tensor[:, LOUD] /= GAIN
    return {name: tensor.contiguous() for name, tensor in found.items()}
