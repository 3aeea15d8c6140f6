"""What ports get wrong about the order of heads in fused weights.

Owns permutations of an attention's rows and columns. Knows nothing of positions and masks.

    for variant in head_order_variants(attention): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import torch

from ingot.measure.align.diagnosis.stage_spec import AttentionSpec
from ingot.measure.align.diagnosis.variant import Variant, mirrored


def head_order_variants(spec: AttentionSpec) -> Iterator[Variant[AttentionSpec]]:
    """Rows of the QKV product, columns of the output product and the groups of GQA in other orders."""
    for field, leaf, orders in (("rows", "qkv_proj", _row_orders), ("columns", "o_proj", _column_orders)):
        wrong = f"the heads of {spec.name}.{leaf} are in the wrong order"
        for text, order in orders(spec):
            for index in _and_back(order):
                changed = replace(spec, **{field: index})  # type: ignore[arg-type]
                yield mirrored(changed, f"its {field} taken as {text}", "head_order", wrong)
    if 1 < spec.kv_heads < spec.heads:
        yield mirrored(
            replace(spec, cyclic_groups=not spec.cyclic_groups),
            f"key head h mod {spec.kv_heads} for query head h",
            "head_order",
            f"query heads of {spec.name} read the wrong key heads: on one side neighbours share one, on the "
            f"other heads {spec.kv_heads} apart do",
        )


def _and_back(index: torch.Tensor) -> list[torch.Tensor]:
    """The permutation and its inverse, without repeats and without the one that changes nothing."""
    inverse = index.argsort()
    kept = [index] if torch.equal(index, inverse) else [index, inverse]
    return [] if torch.equal(index, torch.arange(len(index), device=index.device)) else kept


def _row_orders(spec: AttentionSpec) -> Iterator[tuple[str, torch.Tensor]]:
    rows = torch.arange(spec.qkv.shape[0], device=spec.qkv.device)
    group, width = spec.heads // spec.kv_heads, spec.head_dim
    grouped = rows.view(spec.kv_heads, group + 2, width)
    parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
    per_head = "q, k, v of one head after another"
    text = per_head if group == 1 else "the queries of a group, its key, its value, then the next group"
    yield text, torch.cat([part.flatten() for part in parts])
    query, key, value = rows.split(spec.sizes)
    yield from _block_orders(spec, rows)
    orders = {"channels before heads": _by_channel, "heads from the last to the first": _reversed}
    for name, index in orders.items():
        first, second, third = index(query, width), index(key, width), index(value, width)
        yield f"{name}, for q, k and v", torch.cat([first, second, third])
        yield f"{name}, for q", torch.cat([first, key, value])
        yield f"{name}, for k and v", torch.cat([query, second, third])
    pairs = _by_pair(spec)
    order = [part.view(-1, width)[:, pairs].flatten() for part in (query, key)]
    yield "even channels before odd ones in each head of q and k", torch.cat([*order, value])
    yield "even channels before odd ones in each head of q", torch.cat([order[0], key, value])
    yield "even channels before odd ones in each head of k", torch.cat([query, order[1], value])
    if 1 < spec.kv_heads < spec.heads:
        regrouped = query.view(group, spec.kv_heads, width).transpose(0, 1).flatten()
        yield "queries of one group apart from each other", torch.cat([regrouped, key, value])


def _block_orders(spec: AttentionSpec, rows: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The three blocks stored in another order than q, k, v."""
    for order in permutations(range(3)):
        sizes = [spec.sizes[i] for i in order]
        stored = dict(zip(order, rows.split(sizes), strict=True))
        yield ", ".join("qkv"[i] for i in order), torch.cat([stored[i] for i in range(3)])


def _column_orders(spec: AttentionSpec) -> Iterator[tuple[str, torch.Tensor]]:
    columns = torch.arange(spec.output.shape[1], device=spec.output.device)
    yield "heads from the last to the first", _reversed(columns, spec.head_dim)
    yield "channels before heads", _by_channel(columns, spec.head_dim)
    if 1 < spec.kv_heads < spec.heads:
        group = spec.heads // spec.kv_heads
        regrouped = columns.view(group, spec.kv_heads, spec.head_dim).transpose(0, 1)
        yield "heads of one group apart from each other", regrouped.flatten()


def _by_channel(rows: torch.Tensor, width: int) -> torch.Tensor:
    return rows.view(width, -1).t().flatten()


def _reversed(rows: torch.Tensor, width: int) -> torch.Tensor:
    return rows.view(-1, width).flip(0).flatten()


def _by_pair(spec: AttentionSpec) -> torch.Tensor:
    """Channels of a head, even rotary ones before odd ones, then those that do not turn."""
    channels = torch.arange(spec.head_dim, device=spec.qkv.device)
    width = spec.head_dim if spec.rope is None else 2 * spec.rope.frequencies.shape[0]
    return torch.cat([channels[:width:2], channels[1:width:2], channels[width:]])
