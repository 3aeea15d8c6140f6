"""What there is to tune for a model: which ops it launches, with which shapes, for how many rows.

Owns the walk over a decoder's products, norms and attention. Knows no kernel's arguments and times nothing.

    for task in workload(model, torch.float16, limits): ...
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.config.build import BuildConfig
from ingot.config.plan import OPS, ROWS, plan_key, row_bucket
from ingot.config.runtime import RuntimeConfig
from ingot.layers.decoder import Decoder
from ingot.layers.linear import all_dense
from ingot.layers.mlp import GatedMLP
from ingot.layers.ways import folds, small_products

PROMPTS = (512, 2048)  # tokens of the prefill steps that are measured
MOST_CONTEXTS = 64  # requests for whose keys and values decode attention is measured


@dataclass(frozen=True)
class Task:
    """One choice to make: the tiles of an op for a shape and a bucket of rows.

    Attributes:
        shape: the dims of the plan's key, without rows.
        rows: numbers of rows to measure; one, unless the op has one choice for any number.
    """

    op: str
    shape: tuple[tuple[str, int], ...]
    rows: tuple[int, ...]

    @property
    def key(self) -> str:
        """The plan's key of this choice."""
        return plan_key(self.op, self.rows[0], dict(self.shape))

    @property
    def sizes(self) -> dict[str, int]:
        """The shape by name."""
        return dict(self.shape)


def workload(model: Decoder, dtype: torch.dtype, limits: BuildConfig) -> list[Task]:
    """Every choice that running ``model`` (weights not needed) in ``dtype`` within ``limits`` asks for.

    Decode steps are measured at the most rows of every bucket up to the largest batch; prefill at
    ``PROMPTS`` tokens.
    """
    config = model.config
    batches = _buckets(limits.max_batch_size)
    longest = min(limits.max_seq_len, RuntimeConfig().token_budget)
    prompts = sorted({min(tokens, longest) for tokens in PROMPTS})
    few = folded_rows(model, dtype, limits)
    others = {row_bucket(rows): rows for rows in sorted({*batches, *prompts} - {*few})}
    heads = {"q": config.num_heads, "kv": config.num_kv_heads, "d": config.head_dim}
    tasks = [_task(op, rows, n=n, k=k) for rows in few for op, n, k in _products(model, rows)]
    tasks += [_task("paged_attention", rows, **heads) for rows in batches if rows <= MOST_CONTEXTS]
    tasks += [_task("rope_kv_write", rows, **heads) for rows in few if "qkv" not in _small(rows)]
    for rows in others.values():
        tasks.append(_task(config.norm, rows, h=config.hidden_size))
        tasks.append(_task("rope_kv_write", rows, **heads))
        if isinstance(model.layers[0].mlp, GatedMLP):
            tasks.append(_task("silu_mul", rows, i=config.intermediate_size))
    return tasks + [_task("prefill_attention", rows, **heads) for rows in prompts]


def folded_rows(model: Decoder, dtype: torch.dtype, limits: BuildConfig) -> list[int]:
    """The numbers of rows, one a bucket, whose decode steps run the folded kernels with dense weights.

    None where some weight has fewer bits: products of such weights have the tiles of product_tiles.py and
    are not tuned.
    """
    folded = all_dense(model) and folds(model.config) and dtype.itemsize == 2
    return [rows for rows in _buckets(limits.max_batch_size) if folded and _small(rows)]


def _small(rows: int) -> frozenset[str]:
    return small_products(rows)


def _task(op: str, *rows: int, **sizes: int) -> Task:
    return Task(op, tuple((dim, sizes[dim]) for dim in OPS[op].dims if dim != ROWS), rows)


def _buckets(most: int) -> list[int]:
    """The largest number of rows in every bucket of 1 to ``most`` rows."""
    return sorted({min(row_bucket(rows), most) for rows in range(1, most + 1)})


def _products(model: Decoder, rows: int) -> list[tuple[str, int, int]]:
    """(op, n, k) of the weights that the folded kernels of a step multiply by; equal ones once.

    Of several rows the output and down products leave split sums, whose tiles are not in the plan.
    """
    config = model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    small = _small(rows)
    weights = {
        "qkv": ("small_qkv", config.q_size + 2 * config.kv_size, hidden),
        "gate_up": ("small_gate_up", 2 * inner, hidden),
        "head": ("small_linear", config.vocab_size, hidden),
    }
    products = [product for name, product in weights.items() if name in small]
    if rows == 1:
        products += [("small_linear", hidden, config.q_size), ("small_linear", hidden, inner)]
    return list(dict.fromkeys(products))
