"""An encoder's stages in a run of the reference decoder, and what the decoder keeps of its outputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.engine.reference_run import ReferenceRun, See
from ingot.models.model_registry import plain_encoder
from ingot.reference.plain_layer import Hooks, PlainAttention
from ingot.reference.plain_stage import Passage, Stage


def encode(run: ReferenceRun, number: int, features: torch.Tensor, see: See) -> None:
    """Encode one input's features as the run's input ``number``; ``see`` gets each module's output."""
    at = Passage.of(run.features(features))
    for stage in encoder_stages(run, number, see):
        at = at.after(stage)
        run.weights.release()


def encoder_stages(run: ReferenceRun, number: int, see: See) -> list[Stage]:
    """The encoder's own stages, then those that keep what the decoder reads of its outputs."""
    if run.config.splices:
        keep = partial(_keep_rows, run, number)
        return [*own_stages(run, see), Stage("encoder", "norm", lambda hidden, kept: keep(hidden))]
    kept = [
        Stage(f"layers.{index}", "norm", lambda hidden, kept, i=index: keep_for(run, number, i, see, hidden))  # type: ignore[misc]
        for index in range(run.config.num_layers)
    ]
    return [*own_stages(run, see), *kept]


def own_stages(run: ReferenceRun, see: See) -> list[Stage]:
    """The encoder's own stages, in order."""

    def within(stage: Stage, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        run.within(stage.name)
        return stage.run(hidden, kept)

    plain = plain_encoder(run.config)
    assert plain is not None
    stages = plain.stages(run.vector, _EncoderHooks(run, see))
    return [replace(stage, run=partial(within, stage)) for stage in stages]


def stage_names(config: DecoderConfig) -> list[str]:
    """Names of an encoder's stages with linear layers, in order; none without an encoder."""
    return [one.name for one in named_stages(config) if one.calibrates]


def named_stages(config: DecoderConfig) -> list[Stage]:
    """An encoder's stages, which cannot run: no weight is read. None without an encoder."""
    plain = plain_encoder(config)
    return [] if plain is None else plain.stages(_unread, Hooks())


def keep_for(run: ReferenceRun, number: int, layer: int, see: See, encoded: torch.Tensor) -> torch.Tensor:
    """Keep what a decoder layer reads of an input: its keys and values, or (the first layer) the spliced
    rows; returns the outputs unchanged.
    """
    if run.config.splices:
        return _keep_rows(run, number, encoded) if layer == 0 else encoded
    name, taken = f"layers.{layer}.encoder_attn.kv_proj", run.arithmetic.taken(encoded)
    output = run.recorded(name, run.product(name, run.recorded(f"{name}/in", taken)))
    see(name, output)
    keys, values = output.unflatten(1, (2, run.config.num_kv_heads, run.config.head_dim)).unbind(1)
    run.keep_encoded(layer, number, keys, values)
    return encoded


def _keep_rows(run: ReferenceRun, number: int, encoded: torch.Tensor) -> torch.Tensor:
    run.rows[number] = run.arithmetic.taken(encoded)
    return encoded


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
        return self._run.encoder_arithmetic.round(x)

    def recorded(
        self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._run.recorded(place, computed, change)

    def see(self, name: str, output: torch.Tensor) -> None:
        self._see(name, output)

    def branch(self, name: str, output: torch.Tensor) -> torch.Tensor:
        return self._run.branch(name, output)
