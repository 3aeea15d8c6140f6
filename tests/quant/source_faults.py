"""Faults of a packer or of a weight map, planted in the stored tensors of a sound engine, hashes right again.

Owns a list of faults by name and the schemes that they are tried under. Knows no verdict.

    engine = built(checkpoint, folder, "w4a16 gptq")
    planted(engine, copy, "q and k swapped")
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ingot import build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import model_of
from ingot.engine.manifest import MANIFEST_FILE, PROOF_FILE, WEIGHTS_FILE, Manifest
from ingot.engine.weights_file import WeightsReader, WeightsWriter
from ingot.layers.decoder import Decoder
from ingot.layers.linear import Linear
from ingot.quant.quantized_values import InBlocks, Quantized
from ingot.quant.schemes.int8_blocks import Int8Blocks
from tests.tiny_models import random_ids, save_model, tiny_config

SCHEMES: dict[str, QuantConfig] = {
    "dense": QuantConfig(),
    "w8a16": QuantConfig("w8a16"),
    "w8a16 gptq": QuantConfig("w8a16", method="gptq"),
    "w8a16 awq": QuantConfig("w8a16", method="awq"),
    "w4a16": QuantConfig("w4a16", 32),
    "w4a16 symmetric": QuantConfig("w4a16", 32, True),
    "w4a16 gptq": QuantConfig("w4a16", 32, method="gptq"),
    "w4a16 awq": QuantConfig("w4a16", 32, method="awq"),
    "w8a8": QuantConfig("w8a8"),
    "w8a8 per tensor": QuantConfig("w8a8", weight_scales="tensor"),
    "w8a8 smoothquant": QuantConfig("w8a8", method="smoothquant"),
    "w4a8": QuantConfig("w4a8", 64),
    "w4a8 gptq": QuantConfig("w4a8", 64, method="gptq"),
    "w4a8 unrotated": QuantConfig("w4a8", 64, rotation=False),
    "rptq-w8a8": QuantConfig("rptq-w8a8", 32),
    "rptq-w4a8": QuantConfig("rptq-w4a8", 32),
    "rptq-w8a8 round": QuantConfig("rptq-w8a8", 32, method="round"),
    "rptq-w4a4 round": QuantConfig("rptq-w4a4", 32, method="round"),
    "w8a8-fp8": QuantConfig("w8a8-fp8"),
    "w8a8-fp8 per tensor": QuantConfig("w8a8-fp8", weight_scales="tensor"),
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
QKV, DOWN = "layers.0.self_attn.qkv_proj", "layers.0.mlp.down_proj"
GATE_UP, O_PROJ = "layers.1.mlp.gate_up_proj", "layers.1.self_attn.o_proj"
KEYS = 32  # rows of keys, and of values: two heads; of queries 64


def write_source(folder: Path, kind: str = "qwen2", seed: int = 0, **changes: object) -> Path:
    """A tiny checkpoint, and samples beside it."""
    save_model(tiny_config(kind, **({} if kind == "gpt2" else SIZES) | changes), folder, seed=seed)
    lines = (json.dumps({"token_ids": random_ids(60, seed=seed + n)}) + "\n" for n in range(6))
    samples_of(folder).write_text("".join(lines))
    return folder


def samples_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.jsonl")


def built(checkpoint: Path, folder: Path, scheme: str, dtype: str = "fp16", **options: object) -> Path:
    """Its engine in one of ``SCHEMES``."""
    quant = SCHEMES[scheme]
    calib = samples_of(checkpoint) if quant.calibrated else None
    return build(
        checkpoint,
        folder,
        **{"device": "cpu", "dtype": dtype, "proof": False, "quant": quant, "calib": calib} | options,
    )


@dataclass
class Stored:
    """An engine's stored tensors, to be changed."""

    model: Decoder
    tensors: dict[str, torch.Tensor]

    def linear(self, name: str) -> Linear:
        module = self.model.get_submodule(name)
        assert isinstance(module, Linear)
        return module

    def own(self, name: str) -> dict[str, torch.Tensor]:
        return {leaf: self.tensors[f"{name}.{leaf}"] for leaf in self.linear(name)._parameters}

    def repack(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """A weight changed as whole and rounded again by its scheme, as a wrong map would have it."""
        linear, own = self.linear(name), self.own(name)
        scheme, bias = linear.scheme, own.get("bias")
        wide = scheme.dequantize(own, linear.in_features, torch.float32)
        weight = change(wide).contiguous()
        if isinstance(scheme, Int8Blocks):
            columns = weight[:, own["order"].long()] if scheme.ordered else weight
            scales = columns.abs().amax(1).clamp(min=1e-6) / (127 if scheme.weight_bits == 8 else 120)
            values = (columns / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
            order = own["order"].long() if scheme.ordered else None
            new = scheme.accept(InBlocks(values, scales, own["steps"], own["zeros"], order), bias)
        else:
            kind = torch.float32 if scheme.packs_fp32 else self.tensors["embed_tokens.weight"].dtype
            new = scheme.pack(weight.to(kind), bias, own.get("input_scale"))
        self.tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in new.items()}

    def shift(self, name: str) -> None:
        """What RPTQ's zeros add, of the other tensors again: a packer makes it of what it packed."""
        linear, own = self.linear(name), self.own(name)
        scheme = linear.scheme
        if isinstance(scheme, Int8Blocks):
            order = own["order"].long() if scheme.ordered else None
            values = InBlocks(
                own["weight"][:, : linear.in_features], own["scales"], own["steps"], own["zeros"], order
            )
            self.tensors[f"{name}.shift"] = scheme.accept(values, own.get("bias"))["shift"]


def _scales(stored: Stored, name: str, factor: float, place: tuple[int, ...] | None = None) -> bool:
    """Scales, or the weight where there are none, times a factor: all, or one."""
    own = stored.own(name)
    leaf = "scales" if "scales" in own else "weight"
    if place is not None and "steps" in own and "pairs" in own:
        own["steps"][0, place[-1]] += 1  # whole inner scales have no 2 %
    elif place is None:
        own[leaf].mul_(factor)
    else:
        own[leaf][(0, place[-1]) if own[leaf].dim() == 2 and leaf == "scales" else (place[-1],)] *= factor
    stored.shift(name)
    return True


def _needlessly_large(stored: Stored) -> bool:
    """Scales 5 % too large, and values rounded to them: no value is off by more than half a scale."""
    linear, own = stored.linear(DOWN), stored.own(DOWN)
    scheme = linear.scheme
    if scheme.dense or isinstance(scheme, Int8Blocks):
        return False
    kind = torch.float32 if scheme.packs_fp32 else stored.tensors["embed_tokens.weight"].dtype
    weight = scheme.dequantize(own, linear.in_features, torch.float32)
    found = scheme.quantize(weight.to(kind))
    assert isinstance(found, Quantized)
    scales = (1.05 * found.scales.float()).to(found.scales.dtype)
    middle = 1 << found.bits - 1 if found.values.dtype == torch.uint8 else 0
    zeros = torch.full_like(scales, middle) if found.zeros is None else found.zeros.to(scales.dtype)
    wide = [
        torch.atleast_2d(t).T.float().repeat_interleave(found.group or linear.in_features, 1)
        for t in (scales, zeros)
    ]
    near, zero = (part[:, : linear.in_features] for part in wide)
    most = 127 if middle == 0 else (1 << found.bits) - 1
    if found.values.is_floating_point():
        values = weight / near
    else:
        values = (weight / near).round().add(zero).clamp(-127 if middle == 0 else 0, most)
    units = None if found.units is None else 1.05 * found.units
    larger = replace(found, values=values.to(found.values.dtype), scales=scales, units=units)
    new = scheme.accept(larger, own.get("bias"), own.get("input_scale"))
    stored.tensors |= {f"{DOWN}.{leaf}": tensor for leaf, tensor in new.items()}
    return True


def _zeros(stored: Stored) -> bool:
    """One row's zeros are off by one; where there are none, its values."""
    own = stored.own(DOWN)
    if "zeros" in own and "shift" not in own:
        zeros = own["zeros"]
        zeros[..., 5] += torch.where(zeros[..., 5] > 7, -1, 1).to(torch.uint8)
        return True
    if own.get("weight") is not None and own["weight"].dtype == torch.int8:
        own["weight"][5] = (own["weight"][5].int() + 1).clamp(-127, 127).to(torch.int8)
        stored.shift(DOWN)
        return True
    if own.get("weight") is not None and own["weight"].itemsize == 1:
        own["weight"][5].view(torch.uint8).add_(1)  # e4m3: the next value away from 0
        return True
    return False


def _halves(stored: Stored) -> bool:
    """Neighbouring values of few bits in the other order: halves of a byte, bytes of a word."""
    own = stored.own(DOWN)
    if "pairs" in own:
        pairs = own["pairs"].int()
        own["pairs"].copy_((pairs >> 4 | pairs << 4) & 255)
    elif "words" in own:
        words = own["words"].int() & 0xFFFF
        bits = 4 if SCHEME_BITS[stored.linear(DOWN).scheme.name] == 4 else 8
        mask = 0x0F0F if bits == 4 else 0x00FF
        own["words"].copy_(((words & mask) << bits | words >> bits & mask).to(torch.int16))
    else:
        weight = own["weight"]
        weight = weight.view(torch.uint8) if weight.itemsize == 1 else weight
        weight.copy_(weight.unflatten(1, (-1, 2)).flip(2).flatten(1))
        stored.shift(DOWN)
    return True


SCHEME_BITS = {"w4a16": 4, "w8a16": 8}


def _swapped(weight: torch.Tensor) -> torch.Tensor:
    """The first head group of queries for the keys."""
    return torch.cat([weight[64:96], weight[32:64], weight[:32], weight[96:]])


def _one_row(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.clone()
    changed[7] = 0
    return changed


def _norm(stored: Stored) -> bool:
    stored.tensors["layers.1.post_attention_layernorm.weight"].mul_(1.01)
    return True


def _bias(stored: Stored) -> bool:
    stored.tensors[f"{QKV}.bias"].zero_()
    stored.shift(QKV)
    return True


def _embedding(stored: Stored) -> bool:
    table = stored.tensors["embed_tokens.weight"]
    table[90] = table[91]
    return True


def _other(stored: Stored) -> bool:
    for leaf in stored.own(DOWN):
        stored.tensors[f"{DOWN}.{leaf}"] = stored.tensors[f"{DOWN.replace('0', '1')}.{leaf}"].clone()
    return True


def _whole(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Stored], bool]:
    def plant(stored: Stored) -> bool:
        stored.repack(name, change)
        return True

    return plant


FAULTS: dict[str, Callable[[Stored], bool]] = {
    "scales x 1.05": lambda s: _scales(s, DOWN, 1.05),
    "scales x 1.05 (qkv)": lambda s: _scales(s, QKV, 1.05),
    "one scale x 1.02": lambda s: _scales(s, DOWN, 1.02, (0, 3)),
    "scales needlessly large": _needlessly_large,
    "one row's zeros off by one": _zeros,
    "values in the other order": _halves,
    "q and k swapped": _whole(QKV, _swapped),
    "gate and up swapped": _whole(GATE_UP, lambda w: torch.cat([w[128:], w[:128]])),
    "a row rolled": _whole(O_PROJ, lambda w: w.roll(1, 0)),
    "a row dropped": _whole(O_PROJ, _one_row),
    "transposed": _whole(O_PROJ, torch.t),
    "another layer's weight": _other,
    "head rolled by a row": _whole("lm_head", lambda w: w.roll(1, 0)),
    "norm x 1.01": _norm,
    "a bias lost": _bias,
    "an embedding row wrong": _embedding,
}


def planted(engine: Path, folder: Path, fault: str) -> bool:
    """A copy of an engine with a fault, its hashes right; False: the scheme has no place for it."""
    manifest = Manifest.read(engine)
    reader = WeightsReader(engine / WEIGHTS_FILE)
    stored = Stored(model_of(manifest), {name: reader.read(name).clone() for name in manifest.tensors})
    layout = dict(stored.tensors)
    if not FAULTS[fault](stored):
        return False
    shutil.copytree(engine, folder, dirs_exist_ok=True)
    (folder / PROOF_FILE).unlink(missing_ok=True)
    with WeightsWriter(folder / WEIGHTS_FILE, layout) as writer:
        for name in layout:
            writer.add(name, stored.tensors[name].to(layout[name].dtype))
    (folder / MANIFEST_FILE).write_text(manifest.replace(tensors=writer.entries).dump(), encoding="utf-8")
    return True
