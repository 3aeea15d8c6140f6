"""What an encoder makes of an input, for a run of the checking decoder.

Covers the order: the encoder's stages, then what the decoder reads of its outputs, which the run keeps: each
layer's keys and values (wiring ``cross``), or the outputs themselves (``prefix``).

    encode(run, number=0, features=features, see=see)
    hidden = run.layer(0, hidden, [Span(0, ids, 0, 0, input=0)], see)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.engine.reference_run import ReferenceRun, See
from ingot.models.model_registry import plain_encoder
from ingot.reference.plain_layer import Hooks, PlainAttention
from ingot.reference.plain_stage import Passage, Stage


def encode(run: ReferenceRun, number: int, features: torch.Tensor, see: See) -> None:
    """Encode features of one input as the run's input ``number``; ``see`` gets each module's output."""
    at = Passage.of(run.features(features))
    for stage in encoder_stages(run, number, see):
        at = at.after(stage)
        run.weights.release()


def encoder_stages(run: ReferenceRun, number: int, see: See) -> list[Stage]:
    """The same, stage by stage: the encoder's own, then what the run keeps of its outputs."""
    return [*own_stages(run, see), *keeping_stages(run, number, see)]


def own_stages(run: ReferenceRun, see: See) -> list[Stage]:
    """The encoder's own stages, in order."""
    plain = plain_encoder(run.config)
    assert plain is not None
    stages = plain.stages(run.vector, _EncoderHooks(run, see))
    return [replace(stage, run=partial(_within, run, stage.name, stage.run)) for stage in stages]


def stage_names(config: DecoderConfig) -> list[str]:
    """Names of an encoder's stages that have linear layers, in order; none where there is no encoder."""
    plain = plain_encoder(config)
    return [] if plain is None else [one.name for one in plain.stages(_unread, Hooks()) if one.calibrates]


def keeping_stages(run: ReferenceRun, number: int, see: See) -> list[Stage]:
    """What the decoder reads of an input's outputs."""
    if run.config.splices:
        keep = partial(_keep_rows, run, number)
        return [Stage("encoder", "norm", lambda hidden, kept: keep(hidden))]
    return [
        Stage(f"layers.{index}", "norm", lambda hidden, kept, i=index: keep_for(run, number, i, see, hidden))  # type: ignore[misc]
        for index in range(run.config.num_layers)
    ]


def keep_for(run: ReferenceRun, number: int, layer: int, see: See, encoded: torch.Tensor) -> torch.Tensor:
    """Keep what a decoder layer reads of an input: its keys and values, or (of the first) the rows that are
    spliced; returns the outputs as they are.
    """
    if run.config.splices:
        return _keep_rows(run, number, encoded) if layer == 0 else encoded
    name = f"layers.{layer}.encoder_attn.kv_proj"
    output = run.recorded(name, run.product(name, run.recorded(f"{name}/in", encoded)))
    see(name, output)
    keys, values = output.unflatten(1, (2, run.config.num_kv_heads, run.config.head_dim)).unbind(1)
    run.keep_encoded(layer, number, keys, values)
    return encoded


def _keep_rows(run: ReferenceRun, number: int, encoded: torch.Tensor) -> torch.Tensor:
    run.rows[number] = encoded
    return encoded


def _within(
    run: ReferenceRun,
    name: str,
    inner: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    kept: torch.Tensor,
) -> torch.Tensor:
    run.within(name)
    return inner(hidden, kept)


def _unread(name: str) -> torch.Tensor:
    raise AssertionError(name)


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
        key, value = self.recorded("keys", key), self.recorded("values", value)
        return attention.attend(query, key, value, attention.positions)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        return self._run.round(x)

    def recorded(
        self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._run.recorded(place, computed, change)

    def see(self, name: str, output: torch.Tensor) -> None:
        self._see(name, output)

    def branch(self, name: str, output: torch.Tensor) -> torch.Tensor:
        return self._run.branch(name, output)
