"""Checkpoints in the formats of GPTQ, AWQ and compressed-tensors, written without Ingot.

Owns a tiny LLaMA whose linear layers are rounded here, and the packing of their numbers as the public
libraries do it: AutoGPTQ 0.8.0.dev0 (commit 9f7d370, ``nn_modules/qlinear/qlinear_cuda.py``,
``QuantLinear.pack``; the format ``gptq_v2`` is GPTQModel's, which stores zeros as they are), AutoAWQ 0.2.9
(commit 88e4c76, ``modules/linear/gemm.py``, ``WQLinear_GEMM.from_linear``) and compressed-tensors 0.20.0
(``compressors/pack_quantized`` and ``naive_quantized``; ``weight_g_idx`` is that of its 0.9). Those functions
gave the same tensors for the same numbers, but for ``gptq_v2`` and ``weight_g_idx``, which they do not write.
Numbers are packed one at a time.

    written = write_packed(tmp_path, Packing("gptq", group=32, act_order=True))
    written.weights["model.layers.0.mlp.up_proj"]        # fp32 [N, K]: what the numbers mean
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.tiny_models import edit_config, make_model, tiny_config

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
INPUT_SCALE = 2**-6  # of static activations: some lie beyond both ends of int8
OPT_SIZES = {"hidden_size": 64, "ffn_dim": 128}
READERS = ({"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"})
READERS += ({"out_proj"}, {"fc1"}, {"fc2"})  # OPT's
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packing:
    """How a checkpoint is packed; ``form`` gptq, gptq_v2, awq, pack or int."""

    form: str
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    act_order: bool = False
    dense: tuple[str, ...] = ()
    spare_biases: bool = False
    activations: str = "none"

    @property
    def label(self) -> str:
        return "-".join(
            str(part) for part in (self.form, self.bits, self.group, self.symmetric, self.act_order)
        )


@dataclass
class Written:
    """A packed checkpoint, what its linear layers mean in fp32, and Hugging Face's model of that."""

    folder: Path
    weights: dict[str, torch.Tensor]
    model: PreTrainedModel
    numbers: dict[str, Rounded] = field(default_factory=dict)


@dataclass(frozen=True)
class Rounded:
    """Numbers [N, K] uint8, scales fp16 and zeros [N, groups], the group of each column [K]."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    index: torch.Tensor

    def values(self) -> torch.Tensor:
        """W [N, K] fp32."""
        zeros, scales = (part[:, self.index].float() for part in (self.zeros, self.scales))
        return (self.numbers.float() - zeros) * scales


def rounded(weight: torch.Tensor, packing: Packing, index: torch.Tensor) -> Rounded:
    """Each column of a weight by the range of its group."""
    top, middle = (1 << packing.bits) - 1, 1 << (packing.bits - 1)
    groups = int(index.max()) + 1
    scales = torch.empty(weight.shape[0], groups, dtype=torch.float16)
    zeros = torch.full(scales.shape, middle)
    for group in range(groups):
        own = weight[:, index == group]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        if packing.symmetric:
            scales[:, group] = 2 * own.abs().amax(1) / top
        else:
            scales[:, group] = (high - low) / top
            zeros[:, group] = (-low / scales[:, group].float()).round().clamp(1, top)
    steps = weight / scales[:, index].float() + zeros[:, index]
    return Rounded(steps.round().clamp(0, top).to(torch.uint8), scales, zeros, index)


def write_packed(folder: Path, packing: Packing, kind: str = "llama", **changes: Any) -> Written:
    """Write a checkpoint; ``changes`` go into the model's config."""
    sizes: dict[str, Any] = OPT_SIZES if kind == "opt" else SIZES
    model = make_model(tiny_config(kind, **(sizes | changes)), seed=5)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.half().float())
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    stored = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    found: dict[str, Rounded] = {}
    generator = torch.Generator().manual_seed(1)
    for layer in range(model.config.num_hidden_layers):
        for readers in READERS:
            names = [n.removesuffix(".weight") for n in stored if f".layers.{layer}." in n]
            names = [n for n in names if n.rpartition(".")[2] in readers and f"{n}.weight" in stored]
            if not names:
                continue
            columns = stored[f"{names[0]}.weight"].shape[1]
            index = torch.arange(columns) // (packing.group or columns)
            if packing.act_order:
                index = index[torch.randperm(columns, generator=generator)]
            for name in names:
                if not any(part in name for part in packing.dense):
                    found[name] = rounded(stored[f"{name}.weight"].float(), packing, index)
    for name, one in found.items():
        weight = stored.pop(f"{name}.weight")
        stored |= {f"{name}.{end}": tensor.contiguous() for end, tensor in pieces(packing, one).items()}
        model.get_submodule(name).weight.data.copy_(one.values())
        if packing.spare_biases and f"{name}.bias" not in stored:
            stored[f"{name}.bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype="float16", quantization_config=configuration(packing))
    return Written(folder, {name: one.values() for name, one in found.items()}, model, found)


def pieces(packing: Packing, one: Rounded) -> dict[str, torch.Tensor]:
    """The tensors of one layer."""
    index = one.index.to(torch.int32)
    if packing.form in ("gptq", "gptq_v2"):
        less = 1 if packing.form == "gptq" else 0
        return {
            "qweight": words(one.numbers.T, packing.bits, dim=0),
            "qzeros": words(one.zeros.T - less, packing.bits, dim=1),
            "scales": one.scales.T,
            "g_idx": index,
        }
    if packing.form == "awq":
        numbers, zeros = (interleaved(part) for part in (one.numbers.T, one.zeros.T))
        return {"qweight": words(numbers, 4, 1), "qzeros": words(zeros, 4, 1), "scales": one.scales.T}
    middle = 1 << (packing.bits - 1)
    own = {"weight_scale": one.scales}
    if packing.form == "int":
        own["weight"] = (one.numbers.to(torch.int16) - middle).to(torch.int8)
        if packing.activations == "static":
            own["input_scale"] = torch.tensor([INPUT_SCALE])
        return own if packing.symmetric else own | {"weight_zero_point": (one.zeros - middle).to(torch.int8)}
    own["weight_packed"] = words(one.numbers, packing.bits, dim=1)
    own["weight_shape"] = torch.tensor(one.numbers.shape)
    if packing.act_order:
        own["weight_g_idx"] = index
    return own if packing.symmetric else own | {"weight_zero_point": words(one.zeros, packing.bits, dim=0)}


def words(numbers: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Numbers along ``dim`` as int32 words, the first in the lowest bits; the last word is filled with 0."""
    whole = np.moveaxis(numbers.numpy().astype(np.uint64), dim, -1)
    per_word = 32 // bits
    packed = np.zeros((whole.shape[0], -(-whole.shape[1] // per_word)), dtype=np.uint64)
    for place in range(whole.shape[1]):
        packed[:, place // per_word] |= whole[:, place] << np.uint64(bits * (place % per_word))
    return torch.from_numpy(np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, dim).copy())


def interleaved(numbers: torch.Tensor) -> torch.Tensor:
    """Eight neighbours of the last dimension in the order in which AWQ packs them."""
    return numbers.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)


def configuration(packing: Packing) -> dict[str, Any]:
    """``quantization_config`` as the library writes it."""
    group = packing.group or -1
    if packing.form in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq",
            "bits": packing.bits,
            "group_size": group,
            "desc_act": packing.act_order,
            "sym": packing.symmetric,
            "checkpoint_format": packing.form,
            "damp_percent": 0.01,
            "true_sequential": True,
        }
    if packing.form == "awq":
        own = {"modules_to_not_convert": list(packing.dense)} if packing.dense else {}
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
        } | own
    weights: Mapping[str, Any] = {
        "num_bits": packing.bits,
        "type": "int",
        "symmetric": packing.symmetric,
        "strategy": "group" if packing.group else "channel",
        "group_size": packing.group or None,
        "actorder": "group" if packing.act_order else None,
        "dynamic": False,
    }
    dynamic = packing.activations == "dynamic"
    inputs = None
    if packing.activations != "none":
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": dynamic}
        inputs |= {"strategy": "token" if dynamic else "tensor", "observer": None, "group_size": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packing.form == "pack" else "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def reference_logits(written: Written, ids: list[int]) -> torch.Tensor:
    """Hugging Face's logits [T, vocab_size] in fp32 with the numbers' values as weights."""
    with torch.no_grad():
        return written.model(torch.tensor([ids])).logits[0]


def change_quantization(folder: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, quantization_config=config["quantization_config"] | changes)
