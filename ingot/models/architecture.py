"""What a model is to the rest of Ingot.

Covers the description of an architecture as data: its Hugging Face names, how its config reads, and its
weight map.

    LLAMA = Architecture("llama", ("LlamaForCausalLM",), "llama", KEYS, config_from_hf, weight_map)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from ingot.checkpoint.weight_map import WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError, ConfigError
from ingot.layers.build_context import BuildContext
from ingot.layers.decoder import Decoder
from ingot.layers.encoder_pass import EncoderPass
from ingot.layers.forward_batch import Spliced
from ingot.models.config_keys import check_keys
from ingot.models.hf_values import HfConfig, check_dtype, check_end_tokens
from ingot.reference.plain_stage import PlainEncoder

LayerRange = tuple[int, int] | None
_AGAIN = "correct config.json, or download it again"


class Model(Protocol):
    """What sets models apart where they run; ``Decoder`` is one. layers/decoder_forward.py runs their layers.

    What becomes of the encoded is ``DecoderConfig.wiring``.
    """

    def encode(self, features: torch.Tensor, forward_pass: EncoderPass) -> torch.Tensor:
        """Features of one input, or of N of one shape, in the model's dtype → [positions, encoder's
        hidden_size], of one after another.
        """
        ...

    def embed(
        self, input_ids: torch.Tensor, positions: torch.Tensor, spliced: Spliced | None = None
    ) -> torch.Tensor:
        """[T] ids and [T] positions → hidden states [T, hidden_size], some of them ``spliced``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, hidden_size] → [L, vocab_size], in the model's dtype."""
        ...


if TYPE_CHECKING:
    _DECODER: type[Model] = Decoder


@dataclass(frozen=True)
class Architecture:
    """One supported architecture.

    Attributes:
        name: Ingot's name, stored in the manifest.
        hf_names: entries of ``architectures`` in config.json that mean this one.
        model_type: what ``model_type`` says beside them; a config without it is taken by ``architectures``.
        keys: of config.json, those that ``config_from_hf`` reads, and those of this family known to change
            nothing that the model computes (config_keys.py has those of all families). Any other is refused.
        config_from_hf: config.json → DecoderConfig; raises CheckpointError for what is not supported.
        weight_map: (config of the whole checkpoint, layers to keep) → weight map.
        encoder: builds the module that encodes inputs (layers/encoder_blocks/encoder.py: ``Encoder``), whose
            weights are named ``encoder.…``; None where there is none.
        check_generation: refuses a generation_config.json (and the vocabulary's size) by which the model
            could not run; None where only end tokens matter.
        plain_encoder: the same in plain PyTorch for proofs, as named stages; None: proofs say nothing of the
            encoder.
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

    def read_config(self, hf: HfConfig) -> DecoderConfig:
        """``config_from_hf`` on a file that may hold anything.

        Raises:
            CheckpointError: it is of another model, has settings that nobody reads, lacks a key, or a value
                is unsupported, of the wrong type or out of range.
        """
        try:
            self._check_model_type(hf)
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

    def _check_model_type(self, hf: HfConfig) -> None:
        """A model is not another one for being called so."""
        found = hf.get("model_type")
        if found is not None and found != self.model_type:
            raise CheckpointError(
                "architectures and model_type of config.json name different models",
                seen=f"architectures {hf.get('architectures')}, model_type {found!r}",
                allowed=f"model_type {self.model_type!r} with {' or '.join(self.hf_names)}",
                fix="download the original config.json; renaming a model does not make it a supported one",
            )

    def build(self, config: DecoderConfig, ctx: BuildContext, max_seq_len: int) -> Decoder:
        """The modules, uninitialised, on the current default device."""
        encoder = None if self.encoder is None else self.encoder(config, ctx.at("encoder"))
        return Decoder(config, ctx, max_seq_len, encoder)
