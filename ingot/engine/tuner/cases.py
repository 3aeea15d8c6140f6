"""How each op is called while it is tuned.

Owns one function an op: its inputs for a shape, its call, its candidates, and what it writes. Knows no clock
and chooses nothing.

    case = make_case(task, rows=8, model, inputs)
    case.launch(0, case.candidates[0])
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.config.model import DecoderConfig
from ingot.config.runtime import RuntimeConfig
from ingot.engine.tuner.inputs import Inputs
from ingot.engine.tuner.workload import Task
from ingot.kernels.activation import gated_mlp
from ingot.kernels.attention import paged_attention, prefill_attention
from ingot.kernels.cache import rope_kv_write
from ingot.kernels.norm import layer_norm, rms_norm
from ingot.kernels.product import small_gate_up, small_linear, small_qkv
from ingot.kernels.tiles import prefill_tiles, product_tiles
from ingot.kernels.weight.stored_weight import stored

Tiles = dict[str, int]
Written = tuple[torch.Tensor, ...]
CONTEXT = 1024  # tokens in the cache of each decoding request


@dataclass(frozen=True)
class Case:
    """One op on inputs of one shape.

    Attributes:
        candidates: tile choices, the default first.
        copies: how many weights (or other large inputs) the calls take in turn.
        launch: calls the op on copy ``i`` with tiles, and returns everything that it writes.
        cleared: tensors that the op writes in place; filled with NaN before a result is checked.
    """

    candidates: list[Tiles]
    copies: int
    launch: Callable[[int, Tiles], Written]
    cleared: Written = ()


@dataclass(frozen=True)
class Setting:
    """What cases are made from: the model's numbers, the longest request, and a source of inputs."""

    config: DecoderConfig
    max_seq_len: int
    inputs: Inputs


def make_case(task: Task, rows: int, setting: Setting) -> Case:
    """The case of a task for a number of rows."""
    return CASES[task.op](task.sizes, rows, setting)


def _small_linear(sizes: dict[str, int], rows: int, setting: Setting) -> Case:
    """The head has a norm before it, the other products a residual after them; of several rows, where norms
    are kernels of their own, there is only the head.
    """
    inputs, config = setting.inputs, setting.config
    n, k = sizes["n"], sizes["k"]
    weights, x = inputs.rotating(n, k), inputs.normal(rows, k)
    is_head = n == config.vocab_size
    residual = None if is_head else inputs.normal(rows, n)
    norm = inputs.normal(k) if is_head and rows == 1 else None

    def launch(copy: int, tiles: Tiles) -> Written:
        weight = weights[copy]
        return (small_linear.small_linear(x, weight, None, residual, norm, config.norm_eps, tiles),)

    return Case(_small_candidates(sizes, rows, inputs), len(weights), launch)


def _small_gate_up(sizes: dict[str, int], rows: int, setting: Setting) -> Case:
    inputs, config = setting.inputs, setting.config
    weights, x = inputs.rotating(sizes["n"], sizes["k"]), inputs.normal(rows, sizes["k"])
    norm = inputs.normal(sizes["k"]) if rows == 1 else None

    def launch(copy: int, tiles: Tiles) -> Written:
        return (small_gate_up.small_gate_up(x, weights[copy], norm, config.norm_eps, tiles),)

    return Case(_small_candidates(sizes, rows, inputs), len(weights), launch)


def _small_qkv(sizes: dict[str, int], rows: int, setting: Setting) -> Case:
    inputs, config = setting.inputs, setting.config
    n, k = sizes["n"], sizes["k"]
    weights, x = inputs.rotating(n, k), inputs.normal(rows, k)
    norm = inputs.normal(k) if rows == 1 else None
    bias = inputs.normal(n) if config.qkv_bias else None
    table, slots, keys, values = _place(rows, setting)

    def launch(copy: int, tiles: Tiles) -> Written:
        q = small_qkv.small_qkv(
            x,
            weights[copy],
            bias,
            norm,
            config.norm_eps,
            table,
            slots,
            slots,
            slots,
            keys,
            values,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            logn_length=config.logn_length,
            tiles=tiles,
        )
        return q, keys, values

    return Case(_small_candidates(sizes, rows, inputs), len(weights), launch, (keys, values))


def _small_candidates(sizes: dict[str, int], rows: int, inputs: Inputs) -> list[Tiles]:
    weight = stored(torch.empty(sizes["n"], sizes["k"], dtype=inputs.dtype, device="meta"))
    return product_tiles.candidate_tiles(rows, weight, inputs.dtype.itemsize, inputs.device)


def _norm(sizes: dict[str, int], rows: int, setting: Setting) -> Case:
    inputs, config, hidden = setting.inputs, setting.config, sizes["h"]
    xs, residual, weight = inputs.rotating(rows, hidden), inputs.normal(rows, hidden), inputs.normal(hidden)
    if config.norm == "layer_norm":
        candidates, bias = layer_norm.candidate_tiles(hidden, inputs.device), inputs.normal(hidden)
    else:
        candidates, bias = rms_norm.candidate_tiles(hidden, inputs.device), None

    def launch(copy: int, tiles: Tiles) -> Written:
        if bias is not None:
            return layer_norm.layer_norm(xs[copy], weight, bias, config.norm_eps, residual, tiles)
        return rms_norm.rms_norm(xs[copy], weight, config.norm_eps, residual, tiles)

    return Case(candidates, len(xs), launch)


def _silu_mul(sizes: dict[str, int], rows: int, setting: Setting) -> Case:
    xs = setting.inputs.rotating(rows, 2 * sizes["i"])

    def launch(copy: int, tiles: Tiles) -> Written:
        return (gated_mlp.silu_mul(xs[copy], tiles),)

    return Case(gated_mlp.candidate_tiles(setting.inputs.device), len(xs), launch)


def _rope_kv_write(sizes: dict[str, int], rows: int, setting: Setting) -> Case:
    inputs, config = setting.inputs, setting.config
    xs = inputs.rotating(rows, config.q_size + 2 * config.kv_size)
    table, slots, keys, values = _place(rows, setting)
    q_norm, k_norm = (inputs.normal(config.head_dim) if config.qk_norm else None for _ in range(2))

    def launch(copy: int, tiles: Tiles) -> Written:
        q = rope_kv_write.rope_kv_write(
            xs[copy],
            table,
            slots,
            slots,
            slots,
            keys,
            values,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            q_norm_weight=q_norm,
            k_norm_weight=k_norm,
            norm_eps=config.norm_eps,
            logn_length=config.logn_length,
            tiles=tiles,
        )
        return q, keys, values

    return Case(rope_kv_write.candidate_tiles(inputs.device), len(xs), launch, (keys, values))


def _paged_attention(sizes: dict[str, int], rows: int, setting: Setting) -> Case:
    inputs, config = setting.inputs, setting.config
    context = min(CONTEXT, setting.max_seq_len)
    caches, tables = _contexts(rows, context, setting)
    q = inputs.normal(rows, config.num_heads, config.head_dim)
    lengths = inputs.index(torch.full((rows,), context), torch.int32)
    arrivals = inputs.index(torch.zeros(rows * config.num_kv_heads), torch.int32)
    group, device = config.num_heads // config.num_kv_heads, inputs.device
    candidates = paged_attention.candidate_tiles(
        config.num_kv_heads, group, config.head_dim, inputs.dtype.itemsize, device, rows
    )

    def launch(copy: int, tiles: Tiles) -> Written:
        keys, values = caches[copy]
        scale, longest, window = config.attention_scale, setting.max_seq_len, config.sliding_window
        return (
            paged_attention.paged_attention(
                q, keys, values, tables, lengths, scale, longest, window, tiles, arrivals=arrivals
            ),
        )

    return Case(candidates, len(caches), launch)


def _prefill_attention(sizes: dict[str, int], rows: int, setting: Setting) -> Case:
    """One request of ``rows`` new tokens."""
    inputs, config = setting.inputs, setting.config
    caches, tables = _contexts(1, rows, setting)
    q = inputs.normal(rows, config.num_heads, config.head_dim)
    starts, lengths = (
        inputs.index(torch.tensor([0, rows]), torch.int32),
        inputs.index(torch.tensor([rows]), torch.int32),
    )

    def launch(copy: int, tiles: Tiles) -> Written:
        keys, values = caches[copy]
        scale, window = config.attention_scale, config.sliding_window
        out = prefill_attention.prefill_attention(
            q, keys, values, tables, starts, lengths, rows, scale, window, tiles
        )
        return (out,)

    candidates = prefill_tiles.candidate_tiles(rows, config.head_dim, inputs.dtype.itemsize, inputs.device)
    return Case(candidates, len(caches), launch)


def _place(
    rows: int, setting: Setting
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where ``rows`` tokens go: a rotary table; what serves as its rows, positions and slots; and the keys
    and values of just so many blocks.
    """
    inputs, config = setting.inputs, setting.config
    block_size = RuntimeConfig().block_size
    slots = inputs.index(torch.arange(rows))
    table = None if config.rope is None else inputs.normal(rows, config.rope.dim).float()
    shape = (-(-rows // block_size), config.num_kv_heads, block_size, config.head_dim)
    return table, slots, inputs.normal(*shape), inputs.normal(*shape)


def _contexts(
    requests: int, context: int, setting: Setting
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Copies of keys and values that hold ``context`` tokens of each request, and the block tables."""
    inputs, config = setting.inputs, setting.config
    block_size = RuntimeConfig().block_size
    blocks = -(-context // block_size)
    shape = (2, requests * blocks, config.num_kv_heads, block_size, config.head_dim)
    order = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0))
    caches = [(both[0], both[1]) for both in inputs.rotating(*shape)]
    return caches, inputs.index(order.view(requests, blocks), torch.int32)


CASES: dict[str, Callable[[dict[str, int], int, Setting], Case]] = {
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope_kv_write": _rope_kv_write,
    "silu_mul": _silu_mul,
    "paged_attention": _paged_attention,
    "prefill_attention": _prefill_attention,
    "small_linear": _small_linear,
    "small_qkv": _small_qkv,
    "small_gate_up": _small_gate_up,
}


def poison(case: Case, like: Written) -> None:
    """Fill with NaN what the op writes in place, and memory that its next results are likely to get."""
    for tensor in (*case.cleared, *(torch.empty_like(tensor) for tensor in like)):
        tensor.fill_(float("nan"))


def spread(copies: int, calls: int) -> list[int]:
    """Which copy each of ``calls`` calls takes: all in turn."""
    return list(itertools.islice(itertools.cycle(range(copies)), calls))
