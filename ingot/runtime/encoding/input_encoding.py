"""The encoder cache's tensors: rows of embeddings (wiring ``prefix``) or each layer's second cache
(``cross``), and the encoding of inputs into them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from ingot.config.step_sizes import ENCODED_AT_ONCE, TOKEN_BUCKETS
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.encoder_blocks.encoder import Encoder
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass
from ingot.layers.forward_batch import LayerCache, Spliced
from ingot.layers.observer import Observer
from ingot.layers.step_layout import StepLayout
from ingot.runtime.encoding.encoder_graphs import EncoderGraphs
from ingot.runtime.scheduling.inputs import EncoderEntry, EncoderJob


class Encoding:
    """Encodes inputs of one model; ``caches`` of a model of wiring ``cross`` get their second caches here.

    Args:
        at_once: longest inputs that are encoded together.
        cuda_graphs: capture the encoder.

    Attributes:
        observer: sees places of the encoder's layers (step_record.py); CUDA graphs are then not used.
    """

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[LayerCache],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        at_once: int = 1,
        cuda_graphs: bool = False,
    ) -> None:
        config = model.config
        assert config.encoder is not None
        self._positions = at_once * config.encoder.max_positions
        self._graphs: EncoderGraphs | None = None
        self._pass = MODULE_BY_MODULE
        self.observer: Observer | None = None
        self.model = model
        self.block_size = block_size
        self.device = device
        self._layers: list[tuple[DecoderLayer, LayerCache]] = []
        self._rows = torch.empty(0)
        self._placed = torch.empty(0, dtype=torch.int64)  # of the step that a captured graph computes
        self._filled = False  # whether any of these has a row
        self.splices = False  # the step, which is not one of decodes then
        if config.splices:
            shape = (num_blocks * block_size, config.hidden_size)
            self._rows = torch.zeros(shape, dtype=model.dtype, device=device)
            self._placed = torch.full((TOKEN_BUCKETS[-1],), -1, dtype=torch.int64, device=device)
        for layer, cache in zip(model.layers if config.crosses else (), caches, strict=False):
            assert isinstance(layer, DecoderLayer)
            sizes = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
            by_head = device.type == "cpu"  # every decode step reads a whole window
            cache.encoded = LayerCache.zeros(*sizes, cache.keys.dtype, device, by_head=by_head)
            self._layers.append((layer, cache.encoded))
        if cuda_graphs:
            longest = cast(Encoder, model.encoder).longest
            self._graphs = EncoderGraphs(self._keep, longest, config.encoder.max_positions, at_once, device)

    def encode(self, jobs: Sequence[EncoderJob], *, fused: bool = False, by_module: bool = False) -> None:
        """Encode a step's inputs, those of one shape together; ``by_module`` without CUDA graphs, which hooks
        would not see, else perhaps by ``fused`` kernels.
        """
        left = list(jobs)
        while left:
            group = self.next_group(left)
            left = [job for job in left if job not in group]
            for graph in self.begin(group, fused=fused, by_module=by_module):
                graph.replay()

    def next_group(self, jobs: Sequence[EncoderJob]) -> list[EncoderJob]:
        """The first one, and of its shape as many as there is room for."""
        first = jobs[0].given
        kind = first.features.shape, first.features.device
        alike = [job for job in jobs if (job.given.features.shape, job.given.features.device) == kind]
        most = min(len(alike), max(self._positions // first.positions, 1), ENCODED_AT_ONCE)
        return alike[: 1 << most.bit_length() - 1]  # few sizes, each with graphs

    def begin(
        self,
        jobs: Sequence[EncoderJob],
        *,
        fused: bool = False,
        by_module: bool = False,
        layers: int | None = None,
    ) -> Sequence[torch.cuda.CUDAGraph]:
        """Encode inputs of one shape; or return graphs that do when replayed in order, before others begin:
        one, or several of so many ``layers`` each.
        """
        self._pass = EncoderPass(fused and not by_module, self.observer)
        graphs = not by_module and self._pass.observer is None
        parts = [job.given.features for job in jobs]
        if parts[0].is_cuda:
            for part in parts:  # made on another stream, which must not reuse them before this one has read
                part.record_stream(torch.cuda.current_stream(part.device))
            features = torch.stack(parts)
        else:  # in memory that is copied without a wait
            pinned = self.device.type == "cuda"
            features = torch.empty(len(parts), *parts[0].shape, pin_memory=pinned)
            torch.stack(parts, out=features)
        rows = np.concatenate([self._slots(job.entry, np.arange(job.given.positions)) for job in jobs])
        slots = self._pinned(rows)
        if self._graphs is not None and graphs and self._graphs.fits(features.shape):
            return self._graphs.begin(features, slots, layers)
        self._keep(features.to(self.device, non_blocking=True), slots.to(self.device, non_blocking=True))
        return ()

    @torch.inference_mode()
    def _keep(
        self, features: torch.Tensor, slots: torch.Tensor, between: Callable[[], None] | None = None
    ) -> None:
        """Encode features [N, ...] into the places [N * positions] of their outputs."""
        encoded = self.model.encode(features, replace(self._pass, between=between))
        assert encoded.shape[0] == slots.shape[0]
        if not self._layers:
            self._rows[slots] = encoded
        for layer, cache in self._layers:
            assert layer.encoder_attn is not None
            layer.encoder_attn.write(encoded, cache, slots)

    def place(self, layout: StepLayout) -> bool:
        """Put a step's rows where captured steps read them; returns whether one can compute this step: with
        second caches every request must have its input.
        """
        if self._layers:
            return not layout.some_without_input
        self.splices = layout.inputs.spliced is not None
        room = len(self._placed)
        if layout.num_tokens <= room and (self.splices or self._filled):  # a larger one has no graph
            placed = np.full(room, -1, dtype=np.int64)
            if layout.inputs.spliced is not None:
                placed[: layout.num_tokens] = layout.inputs.spliced
            self._placed.copy_(self._pinned(placed), non_blocking=True)
            self._filled = self.splices
        return True

    def captured(self, tokens: int) -> Spliced | None:
        """What a captured step of so many tokens splices; None: the model splices nothing."""
        return Spliced(self._placed[:tokens], self._rows) if len(self._rows) else None

    def spliced(self, layout: StepLayout) -> Spliced | None:
        """The rows of a step's placeholders; None: it has none."""
        if layout.inputs.spliced is None:
            return None
        return Spliced(self._pinned(layout.inputs.spliced).to(self.device, non_blocking=True), self._rows)

    def _slots(self, entry: EncoderEntry, positions: np.ndarray) -> np.ndarray:
        blocks = entry.table.astype(np.int64)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def _pinned(self, values: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(values)  # pinned, it is copied to the device without a wait
        return host.pin_memory() if self.device.type == "cuda" else host
