"""A step's tensors, filled on the host and sent to the device in one copy.

Owns the memory behind a ``ForwardBatch``: one host buffer, one device buffer, both seen as the batch's
fields. Knows no model and no policy.

    buffer = StepBuffer(num_tokens=8, num_requests=8, table_width=128, num_logits=8, device=device)
    buffer.fill(step, block_size)
    buffer.upload()
"""

from __future__ import annotations

import numpy as np
import torch

from ingot.layers.batch import ForwardBatch
from ingot.runtime.scheduler import ScheduledBatch, ScheduledRequest


class StepBuffer:
    """Room for up to these many tokens, requests, blocks a request and logits rows, and for the counts of
    decode attention with ``num_kv_heads``.

    Rows that ``fill`` leaves over are padding: they write to no slot and attend to nothing.
    """

    def __init__(
        self,
        num_tokens: int,
        num_requests: int,
        table_width: int,
        num_logits: int,
        device: torch.device,
        num_kv_heads: int = 0,
    ) -> None:
        self.num_requests = num_requests
        longs = {"input_ids": num_tokens, "positions": num_tokens, "rope_rows": num_tokens}
        longs |= {"slot_mapping": num_tokens, "logits_indices": num_logits}
        ints = {
            "block_tables": num_requests * table_width,
            "query_start": num_requests + 1,
            "seq_lens": num_requests,
        }
        size = 8 * sum(longs.values()) + 4 * sum(ints.values())
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else self._host
        host, views, start = {}, {}, 0
        for names, dtype, width in ((longs, torch.int64, 8), (ints, torch.int32, 4)):
            for name, count in names.items():
                end = start + count * width
                host[name] = self._host[start:end].view(dtype).numpy()
                views[name] = self._device[start:end].view(dtype)
                start = end
        host["block_tables"] = host["block_tables"].reshape(num_requests, table_width)
        views["block_tables"] = views["block_tables"].view(num_requests, table_width)
        self.host: dict[str, np.ndarray] = host
        if num_kv_heads:  # never uploaded: the kernels that count in it leave it at zero
            views["arrivals"] = torch.zeros(num_requests * num_kv_heads, dtype=torch.int32, device=device)
        self._views = views

    def batch(self, max_query_len: int, max_seq_len: int) -> ForwardBatch:
        """The device side as a batch."""
        return ForwardBatch(**self._views, max_query_len=max_query_len, max_seq_len=max_seq_len)

    def fill(self, step: ScheduledBatch, block_size: int) -> None:
        """Write a step into the host side."""
        host = self.host
        host["slot_mapping"].fill(-1)
        host["seq_lens"].fill(0)
        token = 0
        logits: list[int] = []
        for row, item in enumerate(step.requests):
            end = token + item.count
            self._fill_request(row, token, item, block_size)
            logits.extend(range(token, end) if item.request.all_logits else [end - 1] if item.samples else [])
            token = end
        host["query_start"][len(step.requests) :] = token
        host["logits_indices"][: len(logits)] = logits

    def upload(self) -> None:
        """Send the host side to the device, without waiting for it."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def _fill_request(self, row: int, token: int, item: ScheduledRequest, block_size: int) -> None:
        host, request, end = self.host, item.request, token + item.count
        blocks = request.blocks
        host["query_start"][row] = token
        host["seq_lens"][row] = item.start + item.count
        host["block_tables"][row, : len(blocks)] = blocks
        host["input_ids"][token:end] = request.tokens(item.start, item.start + item.count)
        positions = np.arange(item.start, item.start + item.count)
        host["positions"][token:end] = positions
        host["rope_rows"][token:end] = positions + request.rope_offset
        table = host["block_tables"][row].astype(np.int64)
        host["slot_mapping"][token:end] = table[positions // block_size] * block_size + positions % block_size
