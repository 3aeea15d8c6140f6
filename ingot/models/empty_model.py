"""A model's modules without memory: their shapes, and the names of the tensors that an engine stores.

model = empty_model(architecture, config, build, quant, plan)
names = list(stored_tensors(model))
"""

from __future__ import annotations

import torch

from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.device import parse_dtype
from ingot.layers.build_context import BuildContext
from ingot.layers.decoder import Decoder
from ingot.models.architecture import Architecture
from ingot.quant.methods.rotated_weights import check_rotation


def empty_model(
    architecture: Architecture,
    config: DecoderConfig,
    build: BuildConfig,
    quant: QuantConfig,
    plan: KernelPlan,
) -> Decoder:
    """The modules on the meta device: shapes without memory.

    Raises:
        ConfigError: ``quant`` rotates a model that a rotation would change.
    """
    if quant.rotation:
        check_rotation(config)
    ctx = BuildContext(quant, plan, parse_dtype(build.dtype))
    with torch.device("meta"):
        return architecture.build(config, ctx, build.max_seq_len)


def stored_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """Parameters in module order; a tied head is left out."""
    return dict(model.named_parameters())
