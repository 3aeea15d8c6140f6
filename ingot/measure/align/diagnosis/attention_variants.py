"""What ports get wrong about attention: positions, mask, scale, biases, layouts, head norms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, permutations

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.measure.align.diagnosis.module_variants import norm_variants
from ingot.measure.align.diagnosis.rope_variants import rope_variants
from ingot.measure.align.diagnosis.stage_spec import AttentionSpec
from ingot.measure.align.diagnosis.variant import Claim, Variant, bias_variants, mirrored, transposed_variants

LOGN_LENGTHS = (2048, 8192, 32768)
MANY = 64  # windows are tried one by one up to here, then only near powers of two


def attention_variants(
    spec: AttentionSpec, config: DecoderConfig, new_tokens: int, layer: int
) -> Iterator[Variant[AttentionSpec]]:
    """Every variant of an attention, the likeliest first."""
    yield from rope_variants(spec, config, new_tokens)
    yield from _masks(spec)
    yield from _scales(spec, layer)
    yield from _biases(spec)
    yield from _transposed(spec)
    yield from head_order_variants(spec)
    yield from _head_norms(spec)


def _masks(spec: AttentionSpec) -> Iterator[Variant[AttentionSpec]]:
    name = f"the mask of {spec.name}"
    yield Variant(
        replace(spec, causal=False, window=0),
        "no mask: every token sees every other",
        Claim("mask", f"{name} is causal where the original's is not"),
        Claim("mask", f"{name} is missing: tokens see those after them"),
    )
    yield Variant(
        replace(spec, ahead=1),
        "a mask that lets a token see the next one",
        Claim("mask", f"{name} is off by one: the original lets a token see the next one"),
        Claim("mask", f"{name} is off by one: tokens see the next one"),
    )
    yield Variant(
        replace(spec, ahead=-1),
        "a mask that hides a token from itself",
        Claim("mask", f"{name} is off by one: the original hides a token from itself"),
        Claim("mask", f"{name} is off by one: a token does not see itself"),
    )
    for window in _windows(spec):
        text = f"{window} tokens" if window else "none"
        here = f"{spec.window} tokens" if spec.window else "none"
        runs = f"a sliding window of {text}" if window else "no sliding window"
        yield Variant(
            replace(spec, window=window),
            runs,
            Claim("window", f"the sliding window of {spec.name} is {here}, the original's is {text}"),
            Claim("window", f"{spec.name} runs with {runs}, the config says {here}"),
        )


def _windows(spec: AttentionSpec) -> list[int]:
    longest = int(spec.positions.max()) + 1
    near = {spec.window - 1, spec.window + 1, 0} if spec.window else set()
    powers = {2**i + d for i in range(longest.bit_length() + 1) for d in (-1, 0, 1)}
    some = set(range(1, longest)) if longest <= MANY else powers
    usable = {w for w in near | some if w == 0 or 0 < w < longest}
    return sorted(usable - {spec.window}, key=lambda w: (w not in near, w))


def _scales(spec: AttentionSpec, layer: int) -> Iterator[Variant[AttentionSpec]]:
    width = spec.head_dim
    others = {
        1.0: ("missing (1)", "missing"),
        1.0 / width: (f"applied twice (1/{width})", "applied twice"),
        1.0 / math.sqrt(spec.qkv.shape[1]): ("1/sqrt(hidden size)", "taken from the hidden size"),
        spec.scale / (layer + 1): ("divided by the layer number", "divided by the layer number"),
        width**-0.25: (f"{width}^(-1/4)", "applied to one of queries and keys alone"),
    }
    for scale, (text, wrong) in others.items():
        if not math.isclose(scale, spec.scale):
            yield scale_variant(spec, scale, text, wrong)
    for length in {0, *LOGN_LENGTHS} - {spec.logn_length}:
        text = f"with length {length}" if length else "off"
        here = f"with length {spec.logn_length}" if spec.logn_length else "off"
        yield Variant(
            replace(spec, logn_length=length),
            f"log-n scaling {text}",
            Claim("logn", f"log-n scaling of queries is {here}, the original's is {text}"),
            Claim("logn", f"log-n scaling of queries runs {text}, the config says {here}"),
        )


def scale_variant(spec: AttentionSpec, scale: float, text: str, wrong: str) -> Variant[AttentionSpec]:
    return Variant(
        replace(spec, scale=scale),
        f"the attention scale {text}",
        Claim(
            "attention_scale", f"the attention scale of {spec.name} is not the original's, which is {text}"
        ),
        Claim("attention_scale", f"the attention scale of {spec.name} is {wrong}"),
    )


def _biases(spec: AttentionSpec) -> Iterator[Variant[AttentionSpec]]:
    name = f"{spec.name}.qkv_proj.bias"
    yield from bias_variants(spec, ("qkv_bias",), "qkv_bias", name)
    for part, rows in qkv_parts(spec).items():
        yield from bias_variants(spec, ("qkv_bias",), "qkv_bias", name, rows, part)
    yield from bias_variants(spec, ("output_bias",), "o_bias", f"{spec.name}.o_proj.bias")


def qkv_parts(spec: AttentionSpec) -> dict[str, slice]:
    ends = list(accumulate(spec.sizes))
    names = ("query", "key", "value")
    return {n: slice(end - size, end) for n, end, size in zip(names, ends, spec.sizes, strict=True)}


def _transposed(spec: AttentionSpec) -> Iterator[Variant[AttentionSpec]]:
    yield from transposed_variants(spec, "output", f"{spec.name}.o_proj.weight")
    name = f"{spec.name}.qkv_proj.weight"
    yield from transposed_variants(spec, "qkv", name)
    parts = qkv_parts(spec)
    for part, rows in parts.items():
        yield from transposed_variants(spec, "qkv", f"the {part} part of {name}", rows)
    for every in zip(
        *(transposed_variants(spec, "qkv", name, rows) for rows in parts.values()), strict=False
    ):
        whole = spec.qkv.clone()
        for variant, rows in zip(every, parts.values(), strict=True):
            whole[rows] = variant.spec.qkv[rows]
        text = f"the query, key and value parts of {name}"
        yield mirrored(
            replace(spec, qkv=whole),
            f"{text}, each read [in, out] instead of [out, in]",
            "weight_transposed",
            f"{text} are transposed",
        )


def _head_norms(spec: AttentionSpec) -> Iterator[Variant[AttentionSpec]]:
    if spec.query_norm is None or spec.key_norm is None:
        return
    yield mirrored(
        replace(spec, query_norm=spec.key_norm, key_norm=spec.query_norm),
        "the weights of q_norm and k_norm exchanged",
        "head_norm",
        f"q_norm and k_norm of {spec.name} are exchanged",
    )
    for query, key in zip(norm_variants(spec.query_norm), norm_variants(spec.key_norm), strict=False):
        changed = replace(spec, query_norm=query.spec, key_norm=key.spec)
        yield Variant(changed, f"{query.change} (and the same for keys)", query.of_original, query.of_engine)


def head_order_variants(spec: AttentionSpec) -> Iterator[Variant[AttentionSpec]]:
    """Rows of the QKV product, columns of the output product and the groups of GQA in other orders."""
    for field, leaf, orders in (("rows", "qkv_proj", _row_orders), ("columns", "o_proj", _column_orders)):
        wrong = f"the heads of {spec.name}.{leaf} are in the wrong order"
        for text, order in orders(spec):
            inverse = order.argsort()
            if torch.equal(order, torch.arange(len(order), device=order.device)):
                continue
            for index in (order,) if torch.equal(order, inverse) else (order, inverse):
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


def _row_orders(spec: AttentionSpec) -> Iterator[tuple[str, torch.Tensor]]:
    rows = torch.arange(spec.qkv.shape[0], device=spec.qkv.device)
    group, width = spec.heads // spec.kv_heads, spec.head_dim
    grouped = rows.view(spec.kv_heads, group + 2, width)
    parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
    per_head = "q, k, v of one head after another"
    text = per_head if group == 1 else "the queries of a group, its key, its value, then the next group"
    yield text, torch.cat([part.flatten() for part in parts])
    query, key, value = rows.split(spec.sizes)
    for blocks in permutations(range(3)):
        sizes = [spec.sizes[i] for i in blocks]
        stored = dict(zip(blocks, rows.split(sizes), strict=True))
        yield ", ".join("qkv"[i] for i in blocks), torch.cat([stored[i] for i in range(3)])
    orders = {"channels before heads": _by_channel, "heads from the last to the first": _reversed}
    for name, index in orders.items():
        first, second, third = index(query, width), index(key, width), index(value, width)
        yield f"{name}, for q, k and v", torch.cat([first, second, third])
        yield f"{name}, for q", torch.cat([first, key, value])
        yield f"{name}, for k and v", torch.cat([query, second, third])
    channels = torch.arange(width, device=spec.qkv.device)
    turned = width if spec.rope is None else 2 * spec.rope.frequencies.shape[0]
    pairs = torch.cat([channels[:turned:2], channels[1:turned:2], channels[turned:]])
    order = [part.view(-1, width)[:, pairs].flatten() for part in (query, key)]
    yield "even channels before odd ones in each head of q and k", torch.cat([*order, value])
    yield "even channels before odd ones in each head of q", torch.cat([order[0], key, value])
    yield "even channels before odd ones in each head of k", torch.cat([query, order[1], value])
    if 1 < spec.kv_heads < spec.heads:
        regrouped = query.view(group, spec.kv_heads, width).transpose(0, 1).flatten()
        yield "queries of one group apart from each other", torch.cat([regrouped, key, value])


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
