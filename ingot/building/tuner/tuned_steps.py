"""Steps of a few layers with random weights, run as the runtime runs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from ingot.building.random_weights import random_tensors
from ingot.building.tuner.trial_plan import TrialPlan
from ingot.config.build_config import BuildConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import parse_dtype
from ingot.engine.engine_loader import fill
from ingot.layers.decoder import Decoder
from ingot.layers.decoder_forward import Operations, fuses, product_chooser
from ingot.layers.encoder_blocks.encoder import Encoder
from ingot.layers.encoder_pass import EncoderPass
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.products.product_choice import Step
from ingot.layers.step_layout import StepLayout
from ingot.layers.step_record import StepRecord
from ingot.models.model_registry import architecture_named

LAYERS = 4
CONTEXT = 1024  # tokens of each decoding request
_DISTINCT = 256 << 20  # bytes of keys and values that no L2 cache holds; the L2 of an H200 holds 60 MB


@dataclass(frozen=True)
class StepKind:
    """A step: one token each of ``rows`` requests, or one prompt of ``rows`` tokens; or, where it
    ``encodes``, the longest inputs, which have so many positions together.
    """

    decodes: bool
    rows: int
    encodes: bool = False

    def __str__(self) -> str:
        if self.encodes:
            return f"inputs of {self.rows} encoded positions"
        return f"{self.rows} decode tokens" if self.decodes else f"a prompt of {self.rows} tokens"


def _cut(encoder: EncoderConfig | None) -> EncoderConfig | None:
    """An encoder with a few layers, where its settings say how many it has."""
    if encoder is None or "num_layers" not in encoder.settings:
        return encoder
    few = min(LAYERS, encoder.settings["num_layers"])
    return encoder.replace(settings=encoder.settings | {"num_layers": few})


@dataclass(frozen=True)
class _Made:
    batch: ForwardBatch
    caches: list[LayerCache]
    hidden: torch.Tensor
    operations: Operations


class Steps:
    """A decoder of a model's shape, with at most ``LAYERS`` layers, and its steps.

    Patterns of layers are left out: other layers have the scheme of most.
    """

    def __init__(self, model: Decoder, limits: BuildConfig, device: torch.device) -> None:
        self.plan = TrialPlan()
        self.dtype = parse_dtype(limits.dtype)
        self._kinds: dict[StepKind, _Made] = {}
        self._device = device
        self._limits = limits
        self._context = min(CONTEXT, limits.max_seq_len)
        config = model.config.replace(num_layers=min(LAYERS, model.config.num_layers))
        config = config.replace(encoder=_cut(config.encoder))
        # RPTQ's values need samples; what a plan has of such a model, a dense one has too.
        quant = QuantConfig() if model.quant.in_blocks else model.quant
        quant = QuantConfig(quant.scheme, head=quant.head, rotation=False)  # random weights need none
        architecture = architecture_named(config.architecture)
        self._model = architecture.empty_model(config, limits, quant, self.plan)
        self._pass = EncoderPass(fused=fuses(self._model))  # as of the runner
        fill(self._model, random_tensors(self._model, device, limits.dtypes, seed=0), device, limits.dtypes)

    def step(self, kind: StepKind) -> Callable[[], torch.Tensor]:
        """A call that runs the step again; its inputs are always the same."""
        if kind.encodes:
            features = self._features(kind.rows)
            return lambda: self._model.encode(features, self._pass)
        made = self._made(kind)
        return lambda: made.operations.logits(made.hidden.clone(), made.batch, made.caches)

    def computed(self, kind: StepKind) -> list[torch.Tensor]:
        """What the first layer of the step computes and writes, and the logits; unwritten memory is NaN."""
        if kind.encodes:
            return [self._model.encode(self._features(kind.rows), self._pass)]
        made = self._made(kind)
        slots, size = made.batch.slot_mapping, made.caches[0].block_size
        for cache in made.caches:
            for tensor in cache.tensors:
                tensor[slots // size, :, slots % size] = math.nan
        # The allocator hands this memory out again, so that what the step leaves unwritten is NaN.
        torch.full((2 * LAYERS, *made.hidden.shape), math.nan, dtype=self.dtype, device=self._device)
        record = StepRecord()
        batch = replace(made.batch, observer=record.see)
        logits = made.operations.logits(made.hidden.clone(), batch, made.caches)
        record.close({"slot_mapping": slots}, [cache.tensors for cache in made.caches], logits)
        count = {"stream": 2}  # behind attention, and behind the MLP
        seen = [value for name, values in record.values.items() for value in values[: count.get(name, 1)]]
        return [value for value in (*seen, *record.cached[0], logits) if isinstance(value, torch.Tensor)]

    def _features(self, positions: int) -> torch.Tensor:
        """As many of the longest inputs as have so many positions."""
        config, encoder = self._model.config.encoder, self._model.encoder
        assert config is not None
        shape = (positions // config.max_positions, *cast(Encoder, encoder).longest)
        generator = torch.Generator(self._device).manual_seed(0)
        return torch.randn(shape, generator=generator, device=self._device, dtype=self.dtype)

    def _made(self, kind: StepKind) -> _Made:
        if kind not in self._kinds:
            generator = torch.Generator(self._device).manual_seed(0)
            block_size = RuntimeConfig().block_size
            requests, context = (kind.rows, self._context) if kind.decodes else (1, kind.rows)
            width = -(-context // block_size)
            caches = self._caches(requests * width, block_size, generator)
            shape = (kind.rows, self._model.config.hidden_size)
            hidden = torch.randn(shape, generator=generator, device=self._device, dtype=self.dtype)
            step = Step(decodes=kind.decodes, rows=kind.rows if kind.decodes else None)
            operations = Operations(self._model, product_chooser(self._model, caches), step)
            batch = self._batch(kind, requests, context, width, caches[0])
            self._kinds[kind] = _Made(batch, caches, hidden, operations)
        return self._kinds[kind]

    def _caches(self, blocks: int, block_size: int, generator: torch.Generator) -> list[LayerCache]:
        """Random keys and values of every layer; large ones are shared, since no L2 cache holds them."""
        config = self._model.config
        shape = (2, blocks, config.num_kv_heads, block_size, config.head_dim)
        count = min(-(-_DISTINCT // (math.prod(shape) * self.dtype.itemsize)), config.num_layers)
        distinct = [
            LayerCache(*torch.randn(shape, generator=generator, device=self._device, dtype=self.dtype))
            for _ in range(count)
        ]
        return [distinct[layer % count] for layer in range(config.num_layers)]

    def _batch(
        self, kind: StepKind, requests: int, context: int, width: int, cache: LayerCache
    ) -> ForwardBatch:
        """Requests that compute the last token of their context, or all of them."""
        new = 1 if kind.decodes else context
        blocks = [range(row * width, (row + 1) * width) for row in range(requests)]
        layout = StepLayout.of([context - new] * requests, [new] * requests, blocks, cache.block_size)
        arrivals = torch.zeros(requests * cache.num_kv_heads, dtype=torch.int32, device=self._device)
        return ForwardBatch.of(layout, self._device, max_seq_len=self._limits.max_seq_len, arrivals=arrivals)
