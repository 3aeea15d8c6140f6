"""A decoder whose hidden states are rotated by an orthogonal matrix (hadamard.py), with the same outputs.

RMSNorm divides a vector by its length, which no rotation changes, and multiplies by its weight. With that
weight moved into the columns that read the normalised hidden states, everything between embedding and head is
linear in the hidden states, and R can go into all that writes them (embedding, output and down products) and
its transpose, by way of x R · (W R)ᵀ = x Wᵀ, into all that reads them (QKV, gate and up, head). The values of
each head are rotated in the same way, between the value rows of the QKV product and the columns of the output
product: attention is linear in them. All of that costs nothing at run time. (QuaRot, arXiv 2404.00456, and
SpinQuant, arXiv 2405.16406, without its training.) The input of the down product stays as it is: behind
SiLU · up it could only be rotated at run time.

A tied head then reads with another weight than the embedding, since only the head has the final norm's
weight: it becomes a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.quantization.quant_config import HEAD
from ingot.errors import ConfigError
from ingot.quant.methods.hadamard import rotate

Load = Callable[[str], torch.Tensor]  # a tensor by the model's name for it
_ROWS_PIECE = 1 << 26  # values of embedding and head on the device at a time
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def can_rotate(config: DecoderConfig) -> bool:
    """Whether a rotation keeps a model's outputs; an encoder, which is not rotated, would no longer fit."""
    return config.norm == "rms_norm" and not config.post_norms and config.encoder is None


def check_rotation(config: DecoderConfig) -> None:
    """Raise ConfigError for a model whose outputs a rotation would change."""
    if not can_rotate(config):
        norms = "post-norms" if config.post_norms else config.norm
        raise ConfigError(
            "this model's hidden states cannot be rotated",
            seen=f"{config.architecture}: {norms}, {config.modality.model}",
            allowed="models of text with RMSNorm before attention and MLP alone",
            field="rotation",
            fix="`rotation=False`, or rotation: false in the `quant` file",
        )


def rotated(name: str, config: DecoderConfig, load: Load, device: torch.device | None = None) -> torch.Tensor:
    """A tensor of the rotated model.

    Args:
        config: of a model that passes ``check_rotation``.
        load: gives the checkpoint's tensors, in any dtype; the head's also where it is tied.
        device: where they are rotated, with the same result; None: where they are.

    Returns:
        fp32 where the rotation changes the tensor, else what ``load`` gives; a layer's are on the device,
        embedding and head where they were: in fp32 they alone would take some 3 GB of it.
    """

    def near(name: str) -> torch.Tensor:
        return load(name).to(device)

    prefix, _, leaf = name.rpartition(".")
    path, _, module = prefix.rpartition(".")
    if name == "norm.weight" or name.endswith(_NORMS):
        return torch.ones_like(load(name))
    if name == "embed_tokens.weight":
        return _by_rows(load(name), device)
    if name == f"{HEAD}.weight":
        return _by_rows(load(name), device, near("norm.weight"))
    if module == "qkv_proj":
        # Each head's value rows are rotated, of the weight and of the bias.
        kept, values = near(name).float().split([config.q_size + config.kv_size, config.kv_size])
        heads = values.unflatten(0, (config.num_kv_heads, config.head_dim))
        tensor = torch.cat([kept, rotate(heads, dim=1).flatten(0, 1)])
        return rotate(tensor, factors=near(_norm_of(path, _NORMS[0]))) if leaf == "weight" else tensor
    if module in ("gate_up_proj", "up_proj") and leaf == "weight":
        return rotate(near(name), factors=near(_norm_of(path, _NORMS[1])))
    if module in ("o_proj", "down_proj"):
        tensor = near(name)
        if module == "o_proj" and leaf == "weight":
            tensor = rotate(tensor.unflatten(1, (config.num_heads, config.head_dim))).flatten(1)
        return rotate(tensor, dim=0)
    return load(name)


def _by_rows(
    weight: torch.Tensor, device: torch.device | None, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """A weight [N, K] rotated on the device, some rows at a time."""
    parts = weight.split(max(1, _ROWS_PIECE // weight.shape[1]))
    return torch.cat([rotate(part.to(device), factors=factors).to(weight.device) for part in parts])


def _norm_of(path: str, norm: str) -> str:
    """The norm before a layer's ``self_attn`` or ``mlp``."""
    return f"{path.rpartition('.')[0]}.{norm}"
