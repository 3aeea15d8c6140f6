"""What an encoder makes of an input, for a run of the checking decoder.

Owns the order: the encoder, then each decoder layer's keys and values of its outputs, which the run keeps.
Knows no proof.

    encode(run, number=0, features=features, see=see)
    hidden = run.layer(0, hidden, [Span(0, ids, 0, 0, input=0)], see)
"""

from __future__ import annotations

from functools import partial

import torch

from ingot.config.model import DecoderConfig
from ingot.engine.reference import ReferenceRun, See
from ingot.layers.checking import Hooks, PlainAttention
from ingot.layers.checking_encoder import PlainSpeechEncoder, Stage
from ingot.models.registry import architecture_named


def plain_encoder(config: DecoderConfig) -> PlainSpeechEncoder | None:
    """The encoder of a model that hears; None where there is none, or it is not of speech."""
    made = architecture_named(config.architecture).plain_encoder if config.encoder is not None else None
    return None if made is None else made(config)


def can_calibrate(config: DecoderConfig) -> bool:
    """Whether a model reads what calibration has: text, or speech."""
    return config.encoder is None or plain_encoder(config) is not None


def encode(run: ReferenceRun, number: int, features: torch.Tensor, see: See) -> None:
    """Encode features [mels, frames] as the run's input ``number``; ``see`` gets each module's output."""
    hidden = run.features(features)
    for stage in encoder_stages(run, number, see):
        hidden = stage(hidden)
        run.weights.release()


def encoder_stages(run: ReferenceRun, number: int, see: See) -> list[Stage]:
    """The same, stage by stage: the encoder's own, then keys and values for each layer of the decoder."""
    layers = range(run.config.num_layers)
    keeping: list[Stage] = [partial(keep_keys_values, run, number, index, see) for index in layers]
    return [*own_stages(run, see), *keeping]


def own_stages(run: ReferenceRun, see: See) -> list[Stage]:
    """The encoder's own stages: convolutions with positions, each layer, the norm."""
    plain = plain_encoder(run.config)
    assert plain is not None
    return plain.stages(run.vector, _EncoderHooks(run, see))


def keep_keys_values(
    run: ReferenceRun, number: int, layer: int, see: See, encoded: torch.Tensor
) -> torch.Tensor:
    """Keep a layer's keys and values of an input; returns its outputs as they are."""
    name = f"layers.{layer}.encoder_attn.kv_proj"
    output = run.had("kv", run.product(name, run.had("encoded", encoded)))
    see(name, output)
    keys, values = output.unflatten(1, (2, run.config.num_kv_heads, run.config.head_dim)).unbind(1)
    run.keep_encoded(layer, number, keys, values)
    return encoded


class _EncoderHooks(Hooks):
    """A run's arithmetic, products and witness, over all positions of one input."""

    def __init__(self, run: ReferenceRun, see: See) -> None:
        self._run = run
        self._see = see

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._run.product(name, x)

    def attend(
        self, attention: PlainAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        key, value = self.had("keys", key), self.had("values", value)
        return attention.attend(query, key, value, attention.positions)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        return self._run.round(x)

    def had(self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None) -> torch.Tensor:
        return self._run.had(place, computed, change)

    def see(self, name: str, output: torch.Tensor) -> None:
        self._see(name, output)

    def branch(self, name: str, output: torch.Tensor) -> torch.Tensor:
        return self._run.branch(name, output)
