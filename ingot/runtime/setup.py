"""Makes an executor for a model on a device, with a KV cache as large as memory allows."""

from __future__ import annotations

import logging
import math
from typing import cast

import torch

from ingot.config.half_dtypes import HalfDtypes, in_encoder
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import most_logits, most_tokens
from ingot.device import dtype_name, on_device, parse_dtype
from ingot.kernels.built_ahead import without_launches
from ingot.layers.cpu_weights import settle_weights
from ingot.layers.decoder import Decoder
from ingot.layers.encoder_blocks.encoder import Encoder
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.invariance import make_batch_invariant
from ingot.layers.linear import held_bytes, linears
from ingot.layers.step_layout import StepLayout
from ingot.memory.ledger import Capacity, MemorySetting, blocks_in, expect_own_embedding, ledger
from ingot.memory.memory_error import capacity_of, described, explained, measured, out_of_memory
from ingot.memory.memory_sizes import cache_dtype, encoded_at_once
from ingot.memory.step_memory import layered_share
from ingot.memory.wide_steps import leaves_enough, with_wide_steps
from ingot.runtime.encoding.input_encoding import Encoding
from ingot.runtime.encoding.prompt_rows import RowRules
from ingot.runtime.executor import Executor
from ingot.runtime.scheduling.encoder_cache import EncoderCache
from ingot.runtime.scheduling.inputs import InputRules
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.pace import Pace
from ingot.runtime.scheduling.scheduler import Chunking
from ingot.runtime.step.chosen_products import Forward
from ingot.runtime.step.runner import Runner, make_caches
from ingot.text.grammar.grammar_compiler import Grammars

_log = logging.getLogger(__name__)


def make_executor(
    model: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    stop_ids: frozenset[int],
    max_batch_size: int,
    max_seq_len: int,
    config: RuntimeConfig,
    grammars: Grammars | None = None,
) -> Executor:
    """Allocate the KV cache and put the parts together; with ``batch_invariant`` the model is switched over.
    Without ``grammars`` no request may bring one.

    Raises:
        ConfigError: the embedding is to stay on the host, and is the head too.
        OutOfMemoryError: the cache cannot hold one request of ``max_seq_len`` tokens.
    """
    setting = _memory_setting(model, device, dtype, max_batch_size, max_seq_len, config)
    if config.batch_invariant:
        make_batch_invariant(model)
    what = "the weights leave too little device memory to run"
    expect_own_embedding(setting)
    if setting.host_embedding_bytes:  # a model that was loaded for another runtime has it on the device
        model.embed_tokens.keep_on_host()
    with explained(what, setting, device, own=_bytes_on(device, model)) as capacity, on_device(device):
        num_blocks = _num_blocks(model, device, setting, capacity)
        num_blocks, config = _widened(model, device, setting, capacity, num_blocks)
        caches = make_caches(model, num_blocks, config.block_size, device, setting.kv_dtype)
        encoding, encoders, inputs = _encoding(model, caches, device, setting, config)
    pace = _pace(model, config)
    runner = Runner(
        model,
        caches,
        device,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        token_budget=config.step_budget,
        cuda_graphs=config.cuda_graphs,
        fused_decode=config.fused_decode and not config.batch_invariant,
        encoding=encoding,
        pace=pace,
    )
    return Executor(
        model,
        runner,
        BlockManager(num_blocks, config.block_size, config.prefix_reuse),
        stop_ids=stop_ids,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        token_budget=config.token_budget,
        run_ahead=config.run_ahead and device.type == "cuda",
        setting=setting,
        encoders=encoders,
        inputs=inputs,
        grammars=grammars,
        chunking=Chunking(config.prompt_chunk, config.long_prompt, pace),
        rows=RowRules.of(model),
        prompt_budget=config.step_budget,
    )


def _memory_setting(
    model: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    max_batch_size: int,
    max_seq_len: int,
    config: RuntimeConfig,
) -> MemorySetting:
    """What the ledger counts of these values; on a CPU, of the weights in the form that they get here."""
    setting = MemorySetting(
        model.config,
        dtype_name(dtype),
        max_batch_size,
        max_seq_len,
        device="cuda" if device.type == "cuda" else "cpu",
        quant=model.quant,
        runtime=config,
        encoder_dtype=_encoder_dtype(model, dtype),
        **_stored_dtypes(model, device),
    )
    return _settled(model, device, setting) if device.type == "cpu" else setting


def _bytes_on(device: torch.device, model: Decoder) -> int:
    """Bytes that a model's tensors take on a device."""
    tensors = (*model.parameters(), *model.buffers())
    own = sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.type)
    return own + sum(linear.packed_bytes for linear in linears(model).values())


def _encoding(
    model: Decoder,
    caches: list[LayerCache],
    device: torch.device,
    setting: MemorySetting,
    config: RuntimeConfig,
) -> tuple[Encoding, EncoderCache, InputRules] | tuple[None, None, None]:
    """What encodes inputs, what keeps them, and which a request may have; None without an encoder."""
    if model.encoder is None or model.config.encoder is None:
        return None, None, None
    on_gpu, size = device.type == "cuda", (setting.encoder_blocks, config.block_size)
    graphs = on_gpu and config.cuda_graphs
    at_once = encoded_at_once(model.config.encoder, config, on_gpu=on_gpu)
    encoding = Encoding(model, caches, *size, device, at_once=at_once, cuda_graphs=graphs)
    encoders = EncoderCache(*size, config.encoder_budget, parts=graphs and model.config.splices)
    return encoding, encoders, InputRules(model.config, cast(Encoder, model.encoder), math.prod(size))


def _pace(model: Decoder, config: RuntimeConfig) -> Pace | None:
    """How many layers of a long prompt's chunk follow a step; None: chunks are steps of their own."""
    share = layered_share(model.config, config)
    return None if share is None else Pace(share, model.config.num_layers)


def _settled(model: Decoder, device: torch.device, setting: MemorySetting) -> MemorySetting:
    """Bring a CPU's weights into the form of its products where there is room; the setting that it is."""
    own = held_bytes(model) + sum(tensor.nbytes for tensor in model.buffers())
    capacity = capacity_of(device, own)
    fits = ledger(setting, capacity).setting
    if fits.on_cpu != setting.on_cpu:
        _log.warning("no room to pack the weights for the CPU: every step dequantizes them, which is slow")
    with described("the packed weights do not fit this machine's memory", fits, capacity):
        settle_weights(model, packs=fits.on_cpu is not None and fits.on_cpu.packs)
    return fits


def _stored_dtypes(model: Decoder, device: torch.device) -> dict[str, str]:
    """Names of the dtypes of a CPU's narrow weights, before they are packed."""
    if device.type != "cpu":
        return {}
    found = {"stored_dtype": dtype_name(model.embed_tokens.weight.dtype)}
    for name, linear in linears(model).items():
        if in_encoder(name) and linear.stored_dtype is not None:
            found["stored_encoder_dtype"] = dtype_name(linear.stored_dtype)
    return found


def _encoder_dtype(model: Decoder, dtype: torch.dtype) -> str | None:
    """The name of the encoder's dtype, where it is another than the decoder's."""
    return None if model.encoder is None else HalfDtypes(*map(dtype_name, (dtype, model.encoder_dtype))).other


def _num_blocks(model: Decoder, device: torch.device, setting: MemorySetting, capacity: Capacity) -> int:
    """Blocks for a full batch of longest requests, or as many as fit; at least one longest request."""
    wanted, size = setting.wanted_blocks, setting.runtime.block_size
    if setting.device == "cuda":
        room, activations = _gpu_room(model, device, setting)
        wanted = min(wanted, blocks_in(room, setting))
        capacity = measured(capacity, setting, room, activations)
    else:
        wanted = ledger(setting, capacity).blocks
    if wanted < setting.blocks_per_request:
        raise out_of_memory(
            "the KV cache cannot hold one request of the engine's maximum length",
            setting,
            capacity,
            seen=f"room for {max(wanted, 0) * size} tokens",
            allowed=f"at least {setting.blocks_per_request * size} tokens",
        )
    return wanted


def _widened(
    model: Decoder, device: torch.device, setting: MemorySetting, capacity: Capacity, num_blocks: int
) -> tuple[int, RuntimeConfig]:
    """Blocks with wide steps, and the config that has them, if they leave enough of so many blocks; else as
    given.
    """
    wide = with_wide_steps(setting, capacity)
    if wide is not setting:
        room, _ = _gpu_room(model, device, wide)
        found = min(wide.wanted_blocks, blocks_in(room, wide))
        if leaves_enough(setting, num_blocks, found):
            return found, wide.runtime
    return num_blocks, setting.runtime


def _gpu_room(model: Decoder, device: torch.device, setting: MemorySetting) -> tuple[int, int]:
    """Bytes of GPU memory left for the cache, and bytes of the largest step's activations."""
    torch.cuda.empty_cache()
    dtype, config = parse_dtype(setting.dtype), setting.runtime
    activations = measured_activations(model, device, dtype, setting.max_batch_size, config)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    bill = ledger(setting, weights={})
    taken = activations + bill.of("reserve") + bill.of("encoders")
    return int(free - total * (1 - config.memory_fraction)) - taken, activations


def largest_step(
    model: Decoder, device: torch.device, dtype: torch.dtype, max_batch_size: int, config: RuntimeConfig
) -> tuple[ForwardBatch, list[LayerCache]]:
    """A prefill of as many tokens as a step may have, and a cache for it.

    Its requests write to the same blocks, so that it takes no more cache than one longest request.
    """
    tokens = most_tokens(config.step_budget, max_batch_size)
    length = tokens if model.rotary is None else min(tokens, model.rotary.max_positions)
    length = min(length, model.config.max_positions) if model.rotary is None else length
    lens = [min(length, tokens - start) for start in range(0, tokens, length)]
    width = -(-length // config.block_size)
    caches = make_caches(model, width, config.block_size, device, cache_dtype(dtype, config.kv_dtype))
    logits = range(most_logits(config.step_budget, max_batch_size))
    none = [0] * len(lens)
    layout = StepLayout.of(
        none, lens, [range(width)] * len(lens), config.block_size, wanted=none, probes=logits
    )
    return ForwardBatch.of(layout, device, max_seq_len=length), caches


@torch.inference_mode()
def run_step(model: Decoder, batch: ForwardBatch, caches: list[LayerCache]) -> None:
    """Compute a step module by module and widen its logits, the most that a step does; of layers that are
    alike the first and the last: the others would take the same memory again.
    """
    Forward(model, caches, fused=False).launch_some(batch).float()


def measured_activations(
    model: Decoder, device: torch.device, dtype: torch.dtype, max_batch_size: int, config: RuntimeConfig
) -> int:
    """Bytes that the largest step takes beside its inputs and cache; ``activation_bytes`` predicts them."""
    batch, caches = largest_step(model, device, dtype, max_batch_size, config)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with without_launches():  # kernels allocate nothing
        run_step(model, batch, caches)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
