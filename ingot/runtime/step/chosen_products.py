"""A step's tensors in, logits out, by the operations chosen for its kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ingot.kernels.tiles.int8_tiles import DECODE_ROWS
from ingot.kernels.tiles.packed_tiles import PACKED_ROWS
from ingot.layers.attention import Attention
from ingot.layers.cpu_layers import CpuLayers
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.decoder import Decoder
from ingot.layers.decoder_forward import Between, Operations, product_chooser
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.linear import linears
from ingot.layers.observer import Observed, both
from ingot.layers.products.chosen_kernels import PLAIN, describe_kernels
from ingot.layers.products.product_choice import BY_MODULE, Step
from ingot.layers.step_record import StepRecord
from ingot.quant.schemes.linear_scheme import LinearScheme

MOST_ROWS = max(PACKED_ROWS, DECODE_ROWS)  # of decode steps whose number of rows matters to a choice


class Forward:
    """Computes steps of one model over one cache.

    ``fused`` asks for operations that do more than a module; ``by_module`` calls each module, so that hooks
    on modules fire.

    Attributes:
        observer: gets a record of every step that runs from now on, on the CPU; set it before the first one,
            since graphs hold what they were captured with.
        record: of the last call; a captured graph's own is written again at every replay.
        encoded_positions: most positions of an input that cross-attention reads; 0: there is none.
    """

    def __init__(self, model: Decoder, caches: Sequence[LayerCache], *, fused: bool) -> None:
        self.model = model
        self.caches = caches
        self.chooser = product_chooser(model, caches)
        self.fused = fused
        self.by_module = False
        self.observer: Callable[[StepRecord], None] | None = None
        self.record: StepRecord | None = None
        encoder = model.config.encoder if model.config.crosses else None
        self.encoded_positions = 0 if encoder is None else encoder.max_positions
        self._operations: dict[Step, Operations] = {}
        self._cpu_layers = None if fused else CpuLayers.of(model, caches)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, vocab_size] of the batch's wanted tokens, in the model's dtype."""
        if self.observer is None:
            return self._logits(batch)
        record = StepRecord()
        logits = self._logits(replace(batch, observer=both(batch.observer, record.see)))
        inputs = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        if batch.encoded is not None:
            inputs |= {"encoded_tables": batch.encoded.block_tables, "encoded_lens": batch.encoded.lens}
        if batch.spliced is not None:
            inputs["spliced_slots"] = batch.spliced.slots
        record.close(inputs, [cache.tensors for cache in self.caches], logits)
        self.record = record
        return logits

    def launch_some(self, batch: ForwardBatch) -> torch.Tensor:
        """Launch every kernel of a step once: of layers that are alike, those of the first. The logits have
        only the shape of a step's.
        """
        return self._logits(batch, self._unlike_layers)

    @functools.cached_property
    def _unlike_layers(self) -> list[int]:
        """The first layer of each kind, and the last one: what follows it is the head."""
        last = len(self.model.layers) - 1
        own = [_kind_of(self.model, at) for at in range(last + 1)]
        kinds = [(own[at], own[min(at + 1, last)]) for at in range(last + 1)]  # a layer ends in the next norm
        return sorted({*map(kinds.index, kinds), last})

    def most_logits(self, num_requests: int) -> int:
        """Rows of logits of so many requests, one each; those of speech may have a probe besides."""
        return num_requests * (2 if self.encoded_positions else 1)

    def with_hidden(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The same logits, and the hidden states [T, hidden_size] of all tokens after the final norm."""
        last: list[torch.Tensor] = []

        def keep(place: str, value: Observed) -> None:
            if place == "stream" and isinstance(value, torch.Tensor):
                last[:] = [value]

        logits = self(replace(batch, observer=both(batch.observer, keep)))
        # ``forward`` itself: an open tap has seen the norm's call already.
        return logits, self.model.norm.forward(last[0])[0]

    def begin(self, batch: ForwardBatch) -> Between:
        """Embed the batch's tokens, for ``run_layers``; such a batch has no record."""
        assert self.observer is None
        return self.operations(self._kind(batch)).begin(self._embedded(batch))

    def run_layers(self, at: Between, batch: ForwardBatch, first: int, last: int) -> None:
        self.operations(self._kind(batch)).run_layers(at, batch, self.caches, first, last)

    def kernels(self) -> dict[str, str]:
        if not self.fused:
            return PLAIN
        model, chooser = self.model, self.chooser
        return describe_kernels(model.config, lambda step: Operations(model, chooser, step).layers)

    def observed(self, record: StepRecord | None) -> None:
        if self.observer is not None and record is not None:
            self.observer(record.on_host())

    def operations(self, step: Step) -> Operations:
        """The operations of a kind of step, chosen when it is first met."""
        if step not in self._operations:
            self._operations[step] = Operations(self.model, self.chooser, step)
        return self._operations[step]

    def _logits(self, batch: ForwardBatch, only: Sequence[int] | None = None) -> torch.Tensor:
        layers = self._cpu_layers
        if layers is not None and not self.by_module and layers.takes(batch):
            return self.model.logits(layers.normed(self._embedded(batch), batch))
        if batch.encoded is not None and batch.max_query_len > 1:
            batch = replace(batch, encoded=batch.encoded.by_token())
        # Nobody here holds on to the embedded tokens: with a long prompt they are memory.
        return self.operations(self._kind(batch)).logits(self._embedded(batch), batch, self.caches, only)

    def _embedded(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = self.model.embed(batch.input_ids, batch.positions, batch.spliced)  # [T, hidden_size]
        batch.see("stream", hidden)
        return hidden

    def _kind(self, batch: ForwardBatch) -> Step:
        if not self.fused or self.by_module:
            return BY_MODULE
        decodes, rows = batch.max_query_len == 1, len(batch.positions)
        return Step(decodes, rows if decodes and rows <= MOST_ROWS else None)


def _kind_of(model: Decoder, index: int) -> str:
    """What a layer's launches and their memory depend on; equal for layers that are alike."""
    layer, rope = model.layers[index], model.rope_table(index)
    tensors = [(name, t.shape, t.dtype) for name, t in (*layer.named_parameters(), *layer.named_buffers())]
    modules = [(name, type(module).__qualname__) for name, module in layer.named_modules()]
    attentions = [
        (one.config, one.scoring) for one in layer.modules() if isinstance(one, (Attention, CrossAttention))
    ]
    schemes = [_scheme_kind(linear.scheme) for linear in linears(layer).values()]
    return str((id(rope), tensors, modules, attentions, schemes))


def _scheme_kind(scheme: LinearScheme) -> tuple[str, list[tuple[str, int | float | str]]]:
    """Its class and settings, without the tensors that some hold."""
    settings = [(name, value) for name, value in vars(scheme).items() if isinstance(value, (int, float, str))]
    return type(scheme).__qualname__, settings
