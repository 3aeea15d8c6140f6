"""An architecture as data: Hugging Face names, how its config reads, weight map, modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ingot.checkpoint.weight_map import Rename, Rule, Tie, WeightMap
from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.device import parse_dtype
from ingot.errors import CheckpointError, ConfigError
from ingot.layers.build_context import BuildContext
from ingot.layers.decoder import Decoder
from ingot.models.config_keys import check_keys
from ingot.models.hf_values import HfConfig, check_dtype, check_end_tokens
from ingot.quant.methods.rotated_weights import check_rotation
from ingot.reference.plain_stage import PlainEncoder

LayerRange = tuple[int, int] | None  # layers to keep
_AGAIN = "correct config.json, or download it again"


@dataclass(frozen=True)
class Architecture:
    """One supported architecture.

    Attributes:
        name: Ingot's name, stored in the manifest.
        hf_names: entries of ``architectures`` in config.json that mean this one.
        model_type: its ``model_type``; a config without one is found by ``architectures``.
        keys: keys of config.json that ``config_from_hf`` reads, and those of this family known to change
            nothing (config_keys.py has those of all families). Any other is refused.
        config_from_hf: config.json → DecoderConfig; raises CheckpointError for what is not supported.
        weight_map: (config of the full checkpoint, layers to keep) → weight map.
        encoder: builds the module that encodes inputs (layers/encoder_blocks/encoder.py: ``Encoder``), whose
            weights are named ``encoder.…``; None: there is none.
        check_generation: refuses an unsupported generation_config.json (given the vocabulary's size); None:
            only end tokens matter.
        text_config: config.json of a model with more than text → that of its text half, which alone is
            built; others as they are. None: there is no such model.
        plain_encoder: the encoder as stages in plain PyTorch; None: proofs say nothing of the encoder.
    """

    name: str
    hf_names: tuple[str, ...]
    model_type: str
    keys: frozenset[str]
    config_from_hf: Callable[[HfConfig], DecoderConfig]
    weight_map: Callable[[DecoderConfig, LayerRange], WeightMap]
    encoder: Callable[[DecoderConfig, BuildContext], nn.Module] | None = None
    check_generation: Callable[[HfConfig, int], object] | None = None
    plain_encoder: Callable[[DecoderConfig], PlainEncoder] | None = None
    text_config: Callable[[HfConfig], HfConfig] | None = None

    def read_config(self, hf: HfConfig) -> DecoderConfig:
        """``config_from_hf`` on a file that may hold anything.

        Raises:
            CheckpointError: it is of another model, has unknown settings, lacks a key, or a value is
                unsupported, of the wrong type or out of range.
        """
        hf = hf if self.text_config is None else self.text_config(hf)
        found = hf.get("model_type")
        if found is not None and found != self.model_type:
            raise CheckpointError(
                "architectures and model_type of config.json name different models",
                seen=f"architectures {hf.get('architectures')}, model_type {found!r}",
                allowed=f"model_type {self.model_type!r} with {' or '.join(self.hf_names)}",
                fix="download the original config.json; renaming a model does not make it a supported one",
            )
        try:
            check_keys(hf, self.keys, self.name)
            check_dtype(hf)
            config = self.config_from_hf(hf)
            check_end_tokens(hf, config.vocab_size, "config.json")
        except ConfigError as error:
            raise CheckpointError(error.what, seen=error.seen, allowed=error.allowed, fix=_AGAIN) from None
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"config.json does not describe a {self.name} model", seen=error, fix=_AGAIN
            ) from None
        return config

    def empty_model(
        self, config: DecoderConfig, build: BuildConfig, quant: QuantConfig, plan: KernelPlan | None = None
    ) -> Decoder:
        """The modules on the meta device: shapes without memory.

        Raises:
            ConfigError: ``quant`` rotates a model that a rotation would change.
        """
        if quant.rotation:
            check_rotation(config)
        plan, dtypes = plan or KernelPlan(), build.dtypes
        ctx = BuildContext(quant, plan, parse_dtype(dtypes.decoder))
        with torch.device("meta"):
            encoder = None
            if self.encoder is not None:
                own = parse_dtype(dtypes.encoder)
                measured = plan if own.itemsize == ctx.dtype.itemsize else KernelPlan()  # for such values
                encoder = self.encoder(config, replace(ctx, dtype=own, plan=measured).at("encoder"))
            model = Decoder(config, ctx, build.max_seq_len, encoder)
            model.encoder_dtype = parse_dtype(dtypes.encoder)
            return model


def weight_and_bias(ours: str, theirs: str) -> list[Rule]:
    """Renames of a module's weight and bias."""
    return [Rename(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]


def head_rule(config: DecoderConfig, stored: str = "lm_head.weight") -> Rule:
    """The head: ``stored`` renamed, or tied to the embedding."""
    if config.tie_word_embeddings:
        return Tie("lm_head.weight", "embed_tokens.weight", copy=stored)
    return Rename("lm_head.weight", stored)
