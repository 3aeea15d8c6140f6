"""The cases of ``ingot bench kernels``: every kernel of a model at its own shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.attention.attention_arguments import Scoring, Sequences
from ingot.kernels.attention.paged_attention import paged_attention
from ingot.kernels.attention.prefill_attention import prefill_attention
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.cache.qkv_placement import Placement, QkvHeads, TokenPlaces
from ingot.kernels.norm.layer_norm import layer_norm
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.few_rows.small_gate_up import small_gate_up
from ingot.kernels.product.few_rows.small_linear import small_linear, small_linear_parts
from ingot.kernels.product.few_rows.small_qkv import small_qkv
from ingot.layers.products.product_choice import small_products
from ingot.layers.rotary import RotaryTable
from ingot.measure.bench.kernel_bench import torch_layer
from ingot.measure.bench.kernel_bench.kernel_case import Effort, Inputs, KernelCase, calls_for
from ingot.measure.side.step_work import causal_pairs
from ingot.reference.plain_layer import Turns, rotated, turns_of

Product = Callable[[torch.Tensor], object]  # of a weight
NORM_ROWS = (1, 8, 1024, 16384)
PREFILL_TOKENS = 2048
BLOCK = 64  # tokens in a cache block
_CACHED_CALLS = 200
_PAGED = "PyTorch's keys are contiguous"
_MOST_NORMS = 16384  # a few rows are small: so many of them leave the L2 cache


@dataclass(frozen=True)
class KernelSetting:
    """The model and the steps that the cases are made for.

    Attributes:
        rows: tokens of a decode step, one per request.
        context: tokens of each request in a decode step.
        max_seq_len: the engine's; attention's launches depend on it.
        folded: whether the model's products have norm, rotary and activation inside.
    """

    config: DecoderConfig
    plan: KernelPlan
    inputs: Inputs
    rows: tuple[int, ...]
    context: int
    prompt_tokens: int
    max_seq_len: int
    folded: bool

    @property
    def window(self) -> int:
        return self.config.sliding_window or self.config.max_positions

    @property
    def seen(self) -> int:
        """The tokens of the context that a decode query sees."""
        return min(self.context, self.window)


def all_cases(s: KernelSetting) -> Iterator[KernelCase]:
    """Every case, lazily, so that one case's inputs are in memory at a time."""
    for rows in sorted({*NORM_ROWS, *s.rows}):
        for add in (False, True):
            yield norm_case(s, rows, add=add, cached=False)
            if 4 * rows * s.config.hidden_size * s.inputs.dtype.itemsize <= s.inputs.cache_bytes:
                yield norm_case(s, rows, add=add, cached=True)
    for rows in s.rows:
        if s.folded:
            yield from product_cases(s, rows)
    for rows in s.rows:
        yield decode_attention_case(s, rows)
    for tokens in sorted({min(tokens, s.window) for tokens in (s.prompt_tokens, PREFILL_TOKENS)}):
        if tokens <= s.config.max_positions:
            yield prefill_attention_case(s, tokens)
    if s.config.gated:
        for rows in sorted({*s.rows, PREFILL_TOKENS}):
            yield silu_mul_case(s, rows)


def norm_case(s: KernelSetting, rows: int, *, add: bool, cached: bool) -> KernelCase:
    """The norm (one tensor read, one written); with ``add`` after adding the residual (two and two)."""
    op, hidden, eps = s.config.norm, s.config.hidden_size, s.config.norm_eps
    tensors = 4 if add else 2
    count = 1 if cached else s.inputs.copies(tensors // 2 * rows * hidden, _MOST_NORMS)
    x = s.inputs.normal(count, rows, hidden)
    residuals = s.inputs.normal(count, rows, hidden) if add else None
    weight, bias = s.inputs.normal(hidden), s.inputs.normal(hidden)
    tiles = tiles_of(s.plan, op, rows, h=hidden)

    def ours(i: int) -> object:
        residual = None if residuals is None else residuals[i % count]
        if op == "rms_norm":
            return rms_norm(x[i % count], weight, eps, residual, tiles=tiles)
        return layer_norm(x[i % count], weight, bias, eps, residual, tiles=tiles)

    def theirs(i: int) -> object:
        total = x[i % count] if residuals is None else x[i % count] + residuals[i % count]
        if op == "rms_norm":
            return F.rms_norm(total, weight.shape, weight, eps), total
        return F.layer_norm(total, weight.shape, weight, bias, eps), total

    num_bytes = (tensors * rows + 1) * hidden * s.inputs.dtype.itemsize
    effort = Effort(f"{op} + residual" if add else op, f"{hidden}", rows, num_bytes, 0.0, cached)
    return KernelCase(effort, ours, theirs, _CACHED_CALLS if cached else calls_for(count))


def product_cases(s: KernelSetting, rows: int) -> Iterator[KernelCase]:
    """The layer's and the head's products that run in our kernels for so many rows."""
    c, hidden, small = s.config, s.config.hidden_size, small_products(rows)
    if "qkv" in small:
        yield _qkv_case(s, rows)
    if "o" in small:
        yield _residual_case(s, rows, hidden, c.q_size)
    if "gate_up" in small:
        yield _gate_up_case(s, rows)
    if "down" in small:
        yield _residual_case(s, rows, hidden, c.intermediate_size)
    if "head" in small:
        yield _head_case(s, rows)


def _product(
    s: KernelSetting, op: str, rows: int, n: int, k: int, ours: Product, theirs: Product
) -> KernelCase:
    """A product with rotating weights [n, k]."""
    weights = s.inputs.rotating(n, k)
    count = len(weights)
    num_bytes = (n * k + rows * (n + k)) * s.inputs.dtype.itemsize
    effort = Effort(op, f"{n}x{k}", rows, num_bytes, 2.0 * rows * n * k)
    calls = calls_for(count)
    return KernelCase(effort, lambda i: ours(weights[i % count]), lambda i: theirs(weights[i % count]), calls)


def _norm(s: KernelSetting, rows: int) -> torch.Tensor | None:
    """The norm inside a product of a single row; for several rows it is a kernel of its own."""
    return s.inputs.normal(s.config.hidden_size) if rows == 1 else None


def _normed(s: KernelSetting, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    return x if norm is None else F.rms_norm(x, norm.shape, norm, s.config.norm_eps)


def _head_case(s: KernelSetting, rows: int) -> KernelCase:
    n, k = s.config.vocab_size, s.config.hidden_size
    x, norm = s.inputs.normal(rows, k), _norm(s, rows)
    tiles = tiles_of(s.plan, "small_linear", rows, n=n, k=k)

    def ours(weight: torch.Tensor) -> object:
        return small_linear(x, weight, None, None, norm, s.config.norm_eps, tiles)

    def theirs(weight: torch.Tensor) -> object:
        return F.linear(_normed(s, x, norm), weight)

    op = "small_linear" if norm is None else "small_linear norm"
    return _product(s, op, rows, n, k, ours, theirs)


def _residual_case(s: KernelSetting, rows: int, n: int, k: int) -> KernelCase:
    """An output or down product: one row adds the residual, several end in sums, residual and next norm."""
    x, residual = s.inputs.normal(rows, k), s.inputs.normal(rows, n)
    norm, eps = s.inputs.normal(n), s.config.norm_eps
    tiles = tiles_of(s.plan, "small_linear", rows, n=n, k=k)

    def ours(weight: torch.Tensor) -> object:
        if rows == 1:
            return small_linear(x, weight, None, residual, tiles=tiles)
        return sum_norm(small_linear_parts(x, weight), residual, norm, eps)

    def theirs(weight: torch.Tensor) -> object:
        total = residual + F.linear(x, weight)
        return total if rows == 1 else (F.rms_norm(total, (n,), norm, eps), total)

    op = "small_linear + residual" if rows == 1 else "small_linear_parts + sum_norm"
    return _product(s, op, rows, n, k, ours, theirs)


def _gate_up_case(s: KernelSetting, rows: int) -> KernelCase:
    n, k, eps = 2 * s.config.intermediate_size, s.config.hidden_size, s.config.norm_eps
    x, norm = s.inputs.normal(rows, k), _norm(s, rows)
    tiles = tiles_of(s.plan, "small_gate_up", rows, n=n, k=k)

    def ours(weight: torch.Tensor) -> object:
        return small_gate_up(x, weight, norm, eps, tiles)

    def theirs(weight: torch.Tensor) -> object:
        return torch_layer.silu_mul(F.linear(_normed(s, x, norm), weight))

    op = "small_gate_up silu" if norm is None else "small_gate_up norm + silu"
    return _product(s, op, rows, n, k, ours, theirs)


def _qkv_case(s: KernelSetting, rows: int) -> KernelCase:
    c, k, eps = s.config, s.config.hidden_size, s.config.norm_eps
    n = c.q_size + 2 * c.kv_size
    x, norm = s.inputs.normal(rows, k), _norm(s, rows)
    bias = s.inputs.normal(n) if c.qkv_bias else None
    keys, values = (s.inputs.normal(rows, c.num_kv_heads, BLOCK, c.head_dim) for _ in range(2))
    positions = s.inputs.long(torch.full((rows,), s.context - 1))
    slots = s.inputs.long(torch.arange(rows) * BLOCK)
    table = None if c.rope is None else RotaryTable(c.rope, s.context).table.to(s.inputs.device)
    turns = None if table is None else turns_at(table, positions, s.inputs.dtype)
    tiles = tiles_of(s.plan, "small_qkv", rows, n=n, k=k)
    heads = QkvHeads(c.num_heads, c.num_kv_heads, c.head_dim, c.logn_length)
    place = Placement(table, TokenPlaces(positions, positions, slots), PagedCache(keys, values), heads)

    def ours(weight: torch.Tensor) -> object:
        return small_qkv(x, weight, bias, norm, eps, place, tiles)

    def theirs(weight: torch.Tensor) -> object:
        qkv = F.linear(_normed(s, x, norm), weight, bias).view(rows, -1, c.head_dim)
        q, new_keys, new_values = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if turns is not None:
            q, new_keys = rotated(q, *turns), rotated(new_keys, *turns)
        keys[:, :, 0], values[:, :, 0] = new_keys, new_values
        return q

    op = "small_qkv rope + cache" if norm is None else "small_qkv norm + rope + cache"
    return _product(s, op, rows, n, k, ours, theirs)


def decode_attention_case(s: KernelSetting, rows: int) -> KernelCase:
    """One query per request over ``context`` tokens of a paged cache; PyTorch's are contiguous."""
    c, width = s.config, -(-s.context // BLOCK)
    blocks = rows * width
    keys = s.inputs.rotating(blocks, c.num_kv_heads, BLOCK, c.head_dim, std=1.0)
    values, count = torch.randn_like(keys), len(keys)
    tables = torch.randperm(blocks, device=s.inputs.device).int().view(rows, width)
    arrivals = torch.zeros(rows * c.num_kv_heads, dtype=torch.int32, device=s.inputs.device)
    lengths = torch.full((rows,), s.context, dtype=torch.int32, device=s.inputs.device)
    q = s.inputs.normal(rows, c.num_heads, c.head_dim)
    tiles = tiles_of(s.plan, "paged_attention", rows, q=c.num_heads, kv=c.num_kv_heads, d=c.head_dim)
    seen = s.seen
    near = (contiguous(t, tables, s.context) for t in (keys, values))
    near_keys, near_values = (t[:, :, :, s.context - seen :] for t in near)

    sequences = Sequences(tables, lengths, s.max_seq_len)
    scoring = Scoring(c.attention_scale, c.sliding_window, c.attention_softcap)

    def ours(i: int) -> object:
        cache = PagedCache(keys[i % count], values[i % count])
        return paged_attention(q, cache, sequences, scoring, tiles, arrivals=arrivals)

    def theirs(i: int) -> object:
        return torch_layer.attention(q[:, :, None], near_keys[i % count], near_values[i % count])

    num_bytes = 2 * (rows * seen * c.kv_size + rows * c.q_size) * s.inputs.dtype.itemsize
    flops = 4.0 * rows * seen * c.q_size
    shape = f"{c.num_heads}/{c.num_kv_heads}x{c.head_dim}, {s.context} tokens"
    effort = Effort("paged_attention", shape, rows, num_bytes, flops, note=_PAGED)
    return KernelCase(effort, ours, theirs, calls_for(count))


def prefill_attention_case(s: KernelSetting, tokens: int) -> KernelCase:
    """One prompt over itself, causal."""
    c, width, device = s.config, -(-tokens // BLOCK), s.inputs.device
    keys, values = (s.inputs.normal(width, c.num_kv_heads, BLOCK, c.head_dim) for _ in range(2))
    tables = torch.randperm(width, device=device).int().view(1, width)
    start = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
    q = s.inputs.normal(tokens, c.num_heads, c.head_dim)
    shape = {"q": c.num_heads, "kv": c.num_kv_heads, "d": c.head_dim}
    tiles = tiles_of(s.plan, "prefill_attention", tokens, **shape)
    near_q = q.transpose(0, 1).contiguous()[None]  # [1, num_heads, tokens, head_dim]
    near_keys, near_values = (contiguous(t[None], tables, tokens)[0] for t in (keys, values))

    cache, sequences = PagedCache(keys, values), Sequences(tables, lengths, tokens, start, tokens)
    scoring = Scoring(c.attention_scale, c.sliding_window, c.attention_softcap)

    def ours(i: int) -> object:
        return prefill_attention(q, cache, sequences, scoring, tiles)

    def theirs(i: int) -> object:
        return torch_layer.attention(near_q, near_keys, near_values, causal=True)

    num_bytes = 2 * tokens * (c.q_size + c.kv_size) * s.inputs.dtype.itemsize
    flops = 4.0 * causal_pairs(tokens, c.sliding_window) * c.q_size
    name = f"{c.num_heads}/{c.num_kv_heads}x{c.head_dim}"
    effort = Effort("prefill_attention", name, tokens, num_bytes, flops, compute_bound=True, note=_PAGED)
    return KernelCase(effort, ours, theirs, calls_for(1))


def silu_mul_case(s: KernelSetting, rows: int) -> KernelCase:
    """Reads gate and up projections, writes their gated product."""
    inner = s.config.intermediate_size
    x = s.inputs.rotating(rows, 2 * inner, std=1.0)
    tiles, count = tiles_of(s.plan, "silu_mul", rows, i=inner), len(x)

    def ours(i: int) -> object:
        return silu_mul(x[i % count], tiles=tiles)

    def theirs(i: int) -> object:
        return torch_layer.silu_mul(x[i % count])

    num_bytes = 3 * rows * inner * s.inputs.dtype.itemsize
    return KernelCase(Effort("silu_mul", f"{inner}", rows, num_bytes, 0.0), ours, theirs, calls_for(count))


def contiguous(cache: torch.Tensor, tables: torch.Tensor, tokens: int) -> torch.Tensor:
    """Paged [copies, blocks, kv_heads, BLOCK, head_dim] → [copies, requests, kv_heads, tokens, head_dim]."""
    pages = cache[:, tables.long()].transpose(2, 3)  # [copies, requests, kv_heads, width, BLOCK, head_dim]
    return pages.flatten(3, 4)[:, :, :, :tokens].contiguous()


def turns_at(table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Turns:
    """A rotary table's cosines and sines at positions, for PyTorch's side."""
    return turns_of(table[positions].to(dtype))


def tiles_of(plan: KernelPlan, op: str, rows: int, **shape: int) -> dict[str, int] | None:
    """The plan's tiles for an op; None: its defaults."""
    return plan.table(op, **shape).at(rows)
