"""Accounting of the encoder cache: entries by input hash, holders, eviction of the least recently used."""

from __future__ import annotations

from collections import OrderedDict

from ingot.config.step_sizes import ENCODER_SHARE
from ingot.runtime.scheduling.inputs import EncoderEntry, EncoderJob, RequestInput
from ingot.runtime.scheduling.request import Request

_TOGETHER = 256  # tokens


class EncoderCache:
    """Entries by hash; a request's own are in ``request.encoded``, by the index of the input.

    Args:
        budget: positions that a step encodes at most; a longer input takes a step's budget alone.
        parts: whether inputs may be encoded in parts (encoder_line.py).
    """

    def __init__(self, num_blocks: int, block_size: int, budget: int, *, parts: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.budget = budget
        self.parts = parts
        self.in_parts = False  # how the current step encodes
        self._unready: list[EncoderEntry] = []
        self._free = list(range(num_blocks))
        self._entries: OrderedDict[bytes, EncoderEntry] = OrderedDict()  # the longest unheld one first

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    @property
    def num_unready(self) -> int:
        """Inputs that are being encoded in parts, or wait for it."""
        self._unready = [entry for entry in self._unready if not entry.ready]
        return len(self._unready)

    def open_step(self, *, beside_decodes: bool) -> None:
        """Choose how a step encodes: in parts beside decodes, unless so many inputs wait that they would take
        all of the steps' time. Else what waits is encoded before the step.
        """
        self.in_parts = self.parts and beside_decodes and self.num_unready * ENCODER_SHARE < 1

    def share(self, request: Request, count: int, jobs: list[EncoderJob]) -> int:
        """How many of the request's next ``count`` tokens a step can compute: those before the first input
        that it can neither find nor encode, or that is not ready. The request holds the inputs that they
        read; those to encode are added to the step's ``jobs``.
        """
        start = request.num_computed
        for index, given in enumerate(request.inputs):
            if not given.encodes or not given.is_read_by(start, start + count):
                continue
            if index not in request.encoded:
                entry = self._entries.get(given.digest)
                if entry is None:
                    entry = self._placed(given, jobs)
                    if entry is None:
                        return max(given.place - start, 0)
                    if self.in_parts:
                        entry.ready = False
                        self._unready.append(entry)
                    jobs.append(EncoderJob(given, entry))
                self._hold(request, index, entry)
            if self.in_parts and not request.encoded[index].ready:
                before = max(given.place - start, 0)  # a few tokens are computed with the input's own
                return before if before > _TOGETHER else 0
        return count

    def awaits(self, request: Request) -> bool:
        """Whether the current step cannot read an input that the request holds."""
        return self.in_parts and any(not entry.ready for entry in request.encoded.values())

    def fork(self, parent: Request, child: Request) -> None:
        for index, entry in parent.encoded.items():
            self._hold(child, index, entry)

    def passed(self, request: Request) -> None:
        """Give back the inputs whose placeholders are all computed."""
        for index in list(request.encoded):
            given = request.inputs[index]
            if given.tokens and given.end <= request.num_computed:
                self._give_back(request, index)

    def release(self, request: Request) -> None:
        for index in list(request.encoded):
            self._give_back(request, index)

    def clear(self) -> None:
        """Forget every entry: a step has failed, and its inputs may not be encoded."""
        assert not any(entry.holders for entry in self._entries.values())
        self._entries.clear()
        self._unready.clear()
        self._free = list(range(self.num_blocks))

    def _placed(self, given: RequestInput, jobs: list[EncoderJob]) -> EncoderEntry | None:
        """A new entry; None: the step's budget or the cache has no room for it."""
        in_flight = sum(job.given.positions for job in jobs)
        if jobs and in_flight + given.positions > self.budget:
            return None
        wanted = -(-given.positions // self.block_size)
        unheld = [entry for entry in self._entries.values() if not entry.holders]
        if wanted > len(self._free) + sum(len(entry.blocks) for entry in unheld):
            return None
        for entry in unheld:
            if wanted <= len(self._free):
                break
            del self._entries[entry.digest]
            self._free += entry.blocks
        blocks, self._free = self._free[:wanted], self._free[wanted:]
        entry = self._entries[given.digest] = EncoderEntry(given.digest, blocks, given.positions)
        return entry

    def _hold(self, request: Request, index: int, entry: EncoderEntry) -> None:
        entry.holders += 1
        request.encoded[index] = entry

    def _give_back(self, request: Request, index: int) -> None:
        entry = request.encoded.pop(index)
        entry.holders -= 1
        if not entry.holders:
            self._entries.move_to_end(entry.digest)
