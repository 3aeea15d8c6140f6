"""Whisper's transcript rules on the device: requests with equal rules share a set of masks and bounds.

The newest token is read on the device, so a step can be sent before the host knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ingot.config.transcript_rules import TranscriptRules
from ingot.kernels.sampling.timestamp_rules import TranscriptTables
from ingot.runtime.scheduling.request import Request
from ingot.text.grammar.grammar_compiler import mask_words


class Mark(NamedTuple):
    """A request's place in its transcript; the values are those of ``hold_transcripts``."""

    place: int
    last_time: int
    paired: int


@dataclass
class _Set:
    """Rules in the tables, and how many requests hold them."""

    index: int
    holders: int = 0


@dataclass
class _Held:
    """A request's set, and what the first ``read`` tokens of its output say."""

    rules: TranscriptRules
    index: int
    read: int = 0
    last_time: int = -1


class Transcripts:
    """Rules of up to ``max_requests`` requests that are in the batch at once."""

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._sets: dict[TranscriptRules, _Set] = {}
        self._held: dict[str, _Held] = {}
        self._free = list(range(max_requests))

    @cached_property
    def tables(self) -> TranscriptTables:
        """Made at first use, then at one address, since graphs hold it."""
        count = len(self._free) + len(self._sets)
        with torch.inference_mode(mode=False):  # they outlive the step that asks first
            masks = torch.zeros(2 * count, mask_words(self.vocab_size), dtype=torch.int32, device=self.device)
            return TranscriptTables(masks, torch.zeros(count, 2, dtype=torch.int64, device=self.device))

    @property
    def num_held(self) -> int:
        return len(self._held)

    def marks(self, requests: Sequence[Request]) -> list[Mark | None]:
        """One mark per request, None without rules; the device has the rules then."""
        return [None if one.params.transcript is None else self._mark(one) for one in requests]

    def release(self, request: Request) -> None:
        """Release an ended or preempted request's rules, which a step in flight may still read."""
        held = self._held.pop(request.request_id, None)
        if held is not None:
            self._sets[held.rules].holders -= 1

    def _mark(self, request: Request) -> Mark:
        held = self._held.get(request.request_id) or self._hold(request)
        output, pending = request.output_ids, request.num_pending
        assert pending <= 1, "the newest token alone is read on the device"
        place = len(output) + pending
        before = max(place - 1, 0)  # tokens before the newest
        first = held.rules.first_timestamp
        if held.rules.timestamps:
            for token in output[held.read : before]:
                held.last_time = token if token >= first else held.last_time
            held.read = before
        paired = place < 2 or output[before - 1] >= first
        return Mark(2 * held.index + (place > 0), held.last_time, int(paired))

    def _hold(self, request: Request) -> _Held:
        rules = request.params.transcript
        assert rules is not None
        found = self._sets.get(rules)
        if found is None:
            if self._free:
                index = self._free.pop()
            else:  # the oldest rules that nobody holds make room
                unheld = next(known for known, one in self._sets.items() if not one.holders)
                index = self._sets.pop(unheld).index
            found = self._sets[rules] = _Set(index)
            self._send(found.index, rules)
        found.holders += 1
        held = self._held[request.request_id] = _Held(rules, found.index)
        return held

    def _send(self, index: int, rules: TranscriptRules) -> None:
        """Two copies to the device, neither of which waits."""
        first = rules.first_timestamp if rules.timestamps and not rules.detect else self.vocab_size
        masks = torch.from_numpy(np.stack([_packed(one) for one in _allowed(rules, self.vocab_size)]))
        bounds = torch.tensor([first, rules.end], dtype=torch.int64)
        for table, values in zip(self.tables, (masks, bounds), strict=True):
            sent = values.pin_memory() if self.device.type == "cuda" else values
            rows = table[2 * index : 2 * index + 2] if table is self.tables.masks else table[index]
            rows.copy_(sent, non_blocking=True)


def _allowed(rules: TranscriptRules, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens allowed in the first place, and in any other: [vocab_size] bool."""
    later = np.full(vocab_size, not rules.detect)
    later[list(rules.detect)] = True
    if rules.detect:
        return later, later
    later[list(rules.suppressed)] = False
    if not rules.timestamps:
        later[rules.first_timestamp :] = False
    first = later.copy()
    first[list(rules.begin_suppressed)] = False
    if rules.timestamps:
        first[: rules.first_timestamp] = False
        if rules.last_first is not None:
            first[rules.first_timestamp + rules.last_first + 1 :] = False
    return first, later


def _packed(allowed: np.ndarray) -> np.ndarray:
    bits = np.zeros(32 * mask_words(len(allowed)), np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view("<i4")
