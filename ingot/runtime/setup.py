"""An executor for a model on a device.

Owns the sizing of the KV cache. Knows nothing of requests.

    executor = make_executor(model, device, dtype, stop_ids, max_batch_size, max_seq_len, RuntimeConfig())
"""

from __future__ import annotations

import itertools

import torch

from ingot.config.runtime import RuntimeConfig
from ingot.device import on_device
from ingot.errors import OutOfMemoryError
from ingot.layers.batch import ForwardBatch
from ingot.layers.decoder import Decoder
from ingot.layers.invariance import make_batch_invariant
from ingot.runtime.executor import Executor
from ingot.runtime.kv_cache import BlockManager
from ingot.runtime.runner import Runner, make_caches
from ingot.runtime.scheduler import LOGITS_CHUNK, most_tokens

_CPU_CACHE_BYTES = 1 << 30
_RESERVE_BYTES = 1 << 30  # graphs, their logits, and the sampler's temporaries


def make_executor(
    model: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    stop_ids: frozenset[int],
    max_batch_size: int,
    max_seq_len: int,
    config: RuntimeConfig,
) -> Executor:
    """Allocate the KV cache and put the parts together; with ``batch_invariant`` the model is switched over.

    Raises:
        OutOfMemoryError: the cache cannot hold one request of ``max_seq_len`` tokens.
    """
    if config.batch_invariant:
        make_batch_invariant(model)
    block_bytes = _block_bytes(model, config.block_size, dtype)
    try:
        with on_device(device):
            num_blocks = _num_blocks(model, device, dtype, block_bytes, max_batch_size, max_seq_len, config)
            caches = make_caches(model, num_blocks, config.block_size, device, dtype)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            "the weights leave too little of the GPU's memory to run",
            seen=str(error).split(". ")[0],
            fix="a smaller token_budget or --max-seq-len, --dtype fp16, or a larger GPU",
        ) from None
    runner = Runner(
        model,
        caches,
        device,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        token_budget=config.token_budget,
        cuda_graphs=config.cuda_graphs,
        fused_decode=config.fused_decode and not config.batch_invariant,
    )
    blocks = BlockManager(num_blocks, config.block_size, config.prefix_reuse)
    return Executor(
        model,
        runner,
        blocks,
        stop_ids=stop_ids,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        token_budget=config.token_budget,
        run_ahead=config.run_ahead and device.type == "cuda",
    )


def _block_bytes(model: Decoder, block_size: int, dtype: torch.dtype) -> int:
    config = model.config
    return 2 * config.num_layers * config.kv_size * block_size * dtype.itemsize


def _num_blocks(
    model: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    block_bytes: int,
    max_batch_size: int,
    max_seq_len: int,
    config: RuntimeConfig,
) -> int:
    """Blocks for a full batch of longest requests, or as many as memory holds; at least one longest
    request.
    """
    per_request = -(-max_seq_len // config.block_size)
    wanted = per_request * max_batch_size
    if config.cache_tokens is not None:
        wanted = -(-config.cache_tokens // config.block_size)
    if device.type == "cuda":
        wanted = min(wanted, _gpu_room(model, device, dtype, max_batch_size, config) // block_bytes)
    elif config.cache_tokens is None:
        wanted = max(min(wanted, _CPU_CACHE_BYTES // block_bytes), per_request)
    if wanted < per_request:
        raise OutOfMemoryError(
            "the KV cache cannot hold one request of the engine's maximum length",
            seen=f"room for {max(wanted, 0) * config.block_size} tokens",
            allowed=f"at least {per_request * config.block_size} tokens",
            fix="a smaller --max-seq-len, a larger memory_fraction or cache_tokens, or a larger GPU",
        )
    return wanted


def _gpu_room(
    model: Decoder, device: torch.device, dtype: torch.dtype, max_batch_size: int, config: RuntimeConfig
) -> int:
    """Bytes of GPU memory left for the cache after weights, the largest step's activations and graphs."""
    torch.cuda.empty_cache()
    activations = _largest_step(model, device, dtype, max_batch_size, config)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - total * (1 - config.memory_fraction)) - activations - _RESERVE_BYTES


@torch.inference_mode()
def _largest_step(
    model: Decoder, device: torch.device, dtype: torch.dtype, max_batch_size: int, config: RuntimeConfig
) -> int:
    """Run one prefill of as many tokens as a step may have over a cache of its own; returns the bytes it took
    beside that.
    """
    tokens = most_tokens(config.token_budget, max_batch_size)
    length = tokens if model.rotary is None else min(tokens, model.rotary.max_positions)
    length = min(length, model.config.max_positions) if model.rotary is None else length
    starts = [*range(0, tokens, length), tokens]
    lens = [b - a for a, b in itertools.pairwise(starts)]
    width = -(-length // config.block_size)
    caches = make_caches(model, width * len(lens), config.block_size, device, dtype)
    positions = torch.cat([torch.arange(n) for n in lens]).to(device)
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).to(device)
    batch = ForwardBatch(
        input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=positions,
        rope_rows=positions,
        slot_mapping=rows * width * config.block_size + positions,
        block_tables=torch.arange(width * len(lens), dtype=torch.int32, device=device).view(len(lens), width),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        logits_indices=torch.arange(min(tokens, max(max_batch_size, LOGITS_CHUNK)), device=device),
        max_query_len=length,
        max_seq_len=length,
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = model(model.embed(batch.input_ids, batch.positions), batch, caches)
    model.logits(hidden[batch.logits_indices]).float()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
