"""Which tokens each request has seen and generated, on the device, for penalties, biases and minimum lengths.

A request gets a slot with the first token that is chosen for it, and gives it back when it ends or is
preempted.
``output_ids`` alone decide what a slot holds: what a step has not counted itself is added before the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ingot.config.sampling_params import MAX_BIASES
from ingot.kernels.sampling.token_penalties import ENDS, GENERATED, IN_PROMPT, BiasTable, count_dtype
from ingot.runtime.scheduling.request import Request


@dataclass
class _Held:
    """A request's slot, and how many of its output's tokens are counted there."""

    slot: int
    counted: int = 0


class TokenCounts:
    """A slot for each of up to ``max_requests`` requests that are in the batch at once and have rules."""

    def __init__(self, max_requests: int, vocab_size: int, max_tokens: int, device: torch.device) -> None:
        self.max_requests = max_requests
        self.vocab_size = vocab_size
        self.device = device
        self._shape = (max_requests, vocab_size)
        self._dtype = count_dtype(max_tokens)
        self._table: torch.Tensor | None = None
        self._bias: BiasTable | None = None
        self._held: dict[str, _Held] = {}
        self._free = list(range(max_requests))

    @property
    def table(self) -> torch.Tensor:
        """[max_requests, vocab_size]; made at first use, then at one address, since graphs hold it."""
        if self._table is None:
            self._table = self._zeros(self._shape[1], self._dtype)
        return self._table

    @property
    def bias(self) -> BiasTable:
        """Of as many slots as ``table``, with room for MAX_BIASES tokens each; made and kept like it."""
        if self._bias is None:
            ids, values = self._zeros(MAX_BIASES, torch.int32), self._zeros(MAX_BIASES, torch.float64)
            self._bias = BiasTable(ids, values)
        return self._bias

    @property
    def num_held(self) -> int:
        return len(self._held)

    @torch.inference_mode()
    def slots(
        self, requests: Sequence[Request], ends: Sequence[Collection[int]], *, counted: bool
    ) -> list[int]:
        """Each request's slot, up to date by the time a step reads it.

        ``ends``: end tokens of each request that may be banned. ``counted``: the step counts its own choices.
        """
        places, values, slots = [], [], []
        for request, own in zip(requests, ends, strict=True):
            parts: list[tuple[np.ndarray, int]] = []
            held = self._held.get(request.request_id)
            if held is None:
                held = self._held[request.request_id] = _Held(self._free.pop())
                self.table[held.slot].zero_()
                self._set_bias(held.slot, request.params.logit_bias)
                parts.append((np.unique(self._known(request.counted_ids)), IN_PROMPT))
                parts.append((np.unique(self._known(list(own))), ENDS))
            known = len(request.output_ids)
            if held.counted < known:
                parts.append((self._known(request.output_ids[held.counted :]), GENERATED))
                held.counted = known
            assert held.counted == known + request.num_pending, "a step chose a token and did not count it"
            held.counted += counted
            for ids, value in parts:
                places.append(held.slot * self.vocab_size + ids)
                values.append(np.full(len(ids), value))
            slots.append(held.slot)
        if places:
            self._add(np.stack([np.concatenate(places), np.concatenate(values)]))
        return slots

    def release(self, request: Request) -> None:
        """Take a request's slot back; a step in flight may still count in it before it is cleared."""
        held = self._held.pop(request.request_id, None)
        if held is not None:
            self._free.append(held.slot)

    def _zeros(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(mode=False):  # it outlives the step that asks first
            return torch.zeros(self._shape[0], width, dtype=dtype, device=self.device)

    def _set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        """Two copies to the device, neither of which waits; rows say how many entries count."""
        if bias:
            ids, values = zip(*sorted(bias.items()), strict=True)
            self.bias.ids[slot, : len(ids)] = self._sent(torch.tensor(ids, dtype=torch.int32))
            self.bias.values[slot, : len(ids)] = self._sent(torch.tensor(values, dtype=torch.float64))

    def _sent(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device, from pinned memory for a GPU."""
        host = host.pin_memory() if self.device.type == "cuda" else host
        return host.to(self.device, non_blocking=True)

    def _known(self, token_ids: Sequence[int]) -> np.ndarray:
        """The ids that are in the vocabulary: placeholders of pictures need not be."""
        ids = np.array(token_ids, dtype=np.int64)
        return ids[(ids >= 0) & (ids < self.vocab_size)]

    def _add(self, places_and_values: np.ndarray) -> None:
        """One copy to the device and one addition; neither waits."""
        places, values = self._sent(torch.from_numpy(places_and_values))
        self.table.view(-1).index_add_(0, places, values.to(self._dtype))
