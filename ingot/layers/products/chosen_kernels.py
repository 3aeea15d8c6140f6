"""Which kernels a decoder's steps run on, in words.

describe_kernels(config, lambda step: Operations(decoder, chooser, step).layers)
# {"decode, 1 to 8 requests": "small kernels", …}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.kernels.product.int8.fp8_library import library_multiplies
from ingot.kernels.product.prompt_gate_up import LEAST_ROWS, takes_gate_up
from ingot.kernels.rows.int8_rows import E4M3, Int8Weight
from ingot.kernels.tiles.packed_tiles import PACKED_ROWS
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.layers.products.layer_products import (
    AddedProduct,
    BlockProduct,
    GatedProduct,
    Int8Product,
    LayerProducts,
    OddProduct,
    PackedProduct,
    Product,
    SmallProduct,
    StreamProduct,
)
from ingot.layers.products.product_choice import Step
from ingot.layers.products.row_forms import DenseForm

ProductsOf = Callable[[Step], Sequence[LayerProducts]]
PLAIN = {"every step": "module by module"}  # if nothing is fused
NAMES = ("qkv", "output", "up", "down")
MOST_ROWS = 257  # of decode steps; larger ones are like the last
MOST_PROMPT_ROWS = 8192
IN_ONE = "gate and up with SiLU in one kernel"
_ENCODED = ("query", "output")
_WORDS = {
    SmallProduct: "small kernels",
    StreamProduct: "streaming kernels",
    PackedProduct: "packed kernels",
    Int8Product: "int8 kernels",
    BlockProduct: "int8 kernels by blocks",
    AddedProduct: "matrix library",
    OddProduct: "small kernels",
}


def describe_kernels(config: DecoderConfig, products_of: ProductsOf) -> dict[str, str]:
    """The kernels of fused steps' products: by number of requests if all decode, and with prompts.
    ``products_of``: each layer's products in a kind of step.
    """
    found: dict[str, str] = {}
    first, before = 1, ""
    for rows in range(1, MOST_ROWS + 1):
        now = _of_step(config, products_of, Step(decodes=True, rows=rows))
        if now != before and before:
            last = rows - 1
            many = f"{first} to {last} requests" if last > first else f"{first} request{'s' * (first > 1)}"
            found[f"decode, {many}"], first = before, rows
        before = now
    found[f"decode, {first} requests and more"] = before
    return found | {"with prompts": _of_step(config, products_of, Step(decodes=False))}


def _of_step(config: DecoderConfig, products_of: ProductsOf, step: Step) -> str:
    """Products by kernel: ``qkv, up: packed kernels; head: small kernels``."""
    by_kernel: dict[str, dict[str, None]] = {}
    apart = config.gated and config.activation != "silu"
    layers = products_of(step)
    products = [(name, getattr(layer, name), layer.down.form) for layer in layers for name in NAMES]
    for layer in layers:
        products += [
            (f"encoded {name}", one, one.form)
            for name, one in zip(_ENCODED, layer.encoded or (), strict=False)
        ]
    head = layers[-1].after
    for name, product, next_form in [*products, ("head", head, head.form)]:
        word = _WORDS.get(type(product)) or _of_module(product, step)
        if isinstance(product, GatedProduct) and not apart and isinstance(next_form, DenseForm):
            word = _of_gated(product, step)
        if product.linear.scheme.input_dtype == E4M3:
            word = _of_fp8(name, product, step)
        if name == "up" and apart and isinstance(product, (SmallProduct, StreamProduct)):
            word += ", activation apart"
        by_kernel.setdefault(word, {})[name] = None
    if len(by_kernel) == 1:
        return next(iter(by_kernel))
    return "; ".join(f"{', '.join(names)}: {word}" for word, names in by_kernel.items())


def _of_gated(product: GatedProduct, step: Step) -> str:
    """The matrix library, or the kernel that its own rule takes for the step's rows (``takes_gate_up``)."""
    linear, weight = product.linear, product.linear.weight
    assert isinstance(weight, torch.Tensor)

    def is_taken(rows: int) -> bool:
        x = torch.empty(rows, linear.in_features, dtype=weight.dtype, device="meta")
        return takes_gate_up(x, weight)

    if step.rows is not None and step.rows < MOST_ROWS:
        return IN_ONE if is_taken(step.rows) else "matrix library"
    taken = [is_taken(rows) for rows in range(LEAST_ROWS, MOST_PROMPT_ROWS + 1, LEAST_ROWS // 8)]
    if not any(taken):
        return "matrix library"
    full = "" if all(taken) else ", in full tiles,"
    return f"matrix library (from {LEAST_ROWS} rows on{full} {IN_ONE})"


def _of_fp8(name: str, product: Product, step: Step) -> str:
    """Ours, or of many rows the matrix library's, which leaves no parts for the next norm."""
    few = step.rows is not None and step.rows <= MAX_ROWS
    if few or not isinstance(product, Int8Product) or (product.splits and name in ("output", "down")):
        return "fp8 products"
    weight = product.weight(step.rows or MAX_ROWS + 1)
    taken = isinstance(weight, Int8Weight) and library_multiplies(weight, product.dtype, product.bias)
    return "matrix library in fp8" if taken else "fp8 products"


def _of_module(product: Product, step: Step) -> str:
    """What multiplies if a product is its module."""
    linear = product.linear
    if linear.origin is not linear.scheme:
        return "packed for the CPU"
    if linear.scheme.dense:
        return "matrix library"
    many = step.rows is None or step.rows > PACKED_ROWS
    return "packed kernels" if many and linear.unpacks_prompts() else "weights widened per step"
