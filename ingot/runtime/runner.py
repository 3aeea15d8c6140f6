"""Scheduled tokens in, logits out.

Owns the KV cache's memory and the way from a ``ScheduledBatch`` to the model and back. Decides nothing: what
runs was decided by the scheduler, what is chosen from the logits is the sampler's.

    runner = Runner(model, caches, device, max_batch_size=8, max_seq_len=4096, cuda_graphs=True)
    logits = runner.run(step)        # [L, vocab_size] on the device
"""

from __future__ import annotations

import torch

from ingot.layers.batch import LayerCache
from ingot.layers.decoder import Decoder
from ingot.runtime.forward import Forward
from ingot.runtime.graphs import DecodeGraphs
from ingot.runtime.scheduler import ScheduledBatch
from ingot.runtime.step_buffer import StepBuffer


def make_caches(
    model: Decoder, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> list[LayerCache]:
    """Zeroed keys and values of every layer: two tensors [num_blocks, num_kv_heads, block_size, head_dim]
    each.
    """
    config = model.config
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    return [
        LayerCache(
            torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
        )
        for _ in range(config.num_layers)
    ]


class Runner:
    """Runs steps of one model on one device.

    ``eager`` turns graphs and fused kernels off while it is set, so that hooks on modules fire.
    """

    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        device: torch.device,
        *,
        max_batch_size: int,
        max_seq_len: int,
        cuda_graphs: bool,
        fused_decode: bool = True,
    ) -> None:
        self.model = model
        self.caches = caches
        sixteen_bit = caches[0].keys.dtype.itemsize == 2
        self.forward = Forward(model, caches, fused=fused_decode and sixteen_bit and device.type == "cuda")
        self.device = device
        self.max_seq_len = max_seq_len
        self.block_size = caches[0].block_size
        use_graphs = cuda_graphs and device.type == "cuda"
        self.graphs = DecodeGraphs(self.forward, device, max_batch_size, max_seq_len) if use_graphs else None

    @property
    def eager(self) -> bool:
        """Whether every step runs module by module."""
        return self.forward.by_module

    @eager.setter
    def eager(self, value: bool) -> None:
        self.forward.by_module = value

    @torch.inference_mode()
    def run(self, step: ScheduledBatch) -> torch.Tensor:
        """Logits of the step's wanted tokens, [L, vocab_size] in the model's dtype.

        A request that wants all logits gets a row for each of its tokens, one that reaches its last token
        gets one, others none; rows follow the step's order.
        """
        self._copy_blocks(step.copies)
        decode_only = all(item.count == 1 and item.samples for item in step.requests)
        if (
            self.graphs is not None
            and not self.eager
            and decode_only
            and self.graphs.fits(len(step.requests))
        ):
            return self.graphs.run(step, self.block_size)
        return self._run_eager(step)

    def _run_eager(self, step: ScheduledBatch) -> torch.Tensor:
        requests = step.requests
        rows = sum(i.count if i.request.all_logits else int(i.samples) for i in requests)
        width = max(len(i.request.blocks) for i in requests)
        kv_heads = self.forward.caches[0].num_kv_heads
        buffer = StepBuffer(step.num_tokens, len(requests), width, rows, self.device, kv_heads)
        buffer.fill(step, self.block_size)
        buffer.upload()
        return self.forward(buffer.batch(max(i.count for i in requests), self.max_seq_len))

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, in every layer."""
        if not copies:
            return
        source, target = (torch.tensor(side, device=self.device) for side in zip(*copies, strict=True))
        for cache in self.caches:
            cache.keys[target] = cache.keys[source]
            cache.values[target] = cache.values[source]
