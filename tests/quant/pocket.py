"""The pocket model, what it costs to make it narrower, and its function with loud channels.

pocket.cost(LLM(engine))            # KL in nats
loud = write_loud(tmp_path / "loud")
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ingot import LLM, build
from ingot.config.quantization.quant_config import QuantConfig
from tests.quant.models import divergence

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "models" / "pocket-chat"
HELDOUT = ROOT / "recipes" / "heldout.jsonl"
LOUD, GAIN = [3, 77, 200], 30.0
LINEAR = ("c_attn.weight", "attn.c_proj.weight", "w1.weight", "w2.weight", "mlp.c_proj.weight")


@dataclass(frozen=True)
class Pocket:
    """Conversations to calibrate with (``calib``) and others to measure on, by what the dense model says."""

    calib: Path
    prompts: list[list[int]]
    wanted: list[torch.Tensor]

    @classmethod
    def of(cls, folder: Path) -> Pocket:
        lines = HELDOUT.read_text(encoding="utf-8").splitlines(keepends=True)
        calib = folder / "calib.jsonl"
        calib.write_text("".join(lines[::2]), encoding="utf-8")
        exact = LLM(POCKET, "cpu")
        prompts = [exact.chat_ids(json.loads(line)["messages"]) for line in lines[1::40]]
        return cls(calib, prompts, [exact.logits(ids).log_softmax(-1) for ids in prompts])

    def cost(self, llm: LLM) -> float:
        """Mean KL in nats from the pocket model."""
        near = (llm.logits(ids).log_softmax(-1) for ids in self.prompts)
        return sum(divergence(a, b) for a, b in zip(self.wanted, near, strict=True)) / len(self.prompts)

    def cost_of(
        self, quant: QuantConfig, folder: Path, checkpoint: Path = POCKET, samples: int = 16
    ) -> float:
        """The same of a checkpoint that is built in a scheme, in ``folder``."""
        given = {"calib": self.calib, "calib_samples": samples} if quant.calibrated else {}
        options = {"device": "cpu", "proof": False, "force": True, "dtype": "fp32"}
        return self.cost(LLM(build(checkpoint, folder, quant=quant, **options, **given), "cpu"))  # type: ignore[arg-type]


def write_loud(folder: Path) -> Path:
    """Three channels behind each norm are 30 times louder, and columns that read them as much quieter."""
    found = {name: tensor.float() for name, tensor in load_file(POCKET / "model.safetensors").items()}
    for name, tensor in found.items():
        if name.endswith(("ln_1.weight", "ln_2.weight")):
            tensor[LOUD] *= GAIN
        elif name.endswith(("c_attn.weight", "w1.weight", "w2.weight")):
            tensor[:, LOUD] /= GAIN
    return write_pocket(folder, found)


def write_pocket(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The pocket model with other weights; returns the folder."""
    folder.mkdir(parents=True)
    for path in POCKET.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    whole = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return folder
