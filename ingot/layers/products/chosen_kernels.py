"""Which kernels a decoder's steps run on, in words.

describe_kernels(config, lambda step: Operations(decoder, chooser, step).layers)
# {"decode, 1 to 8 requests": "small kernels", …}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ingot.config.decoder_config import DecoderConfig
from ingot.kernels.product.int8.fp8_library import library_multiplies
from ingot.kernels.rows.int8_rows import E4M3, Int8Weight
from ingot.kernels.tiles.packed_tiles import PACKED_ROWS
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.layers.products.layer_products import (
    AddedProduct,
    BlockProduct,
    Int8Product,
    LayerProducts,
    OddProduct,
    PackedProduct,
    Product,
    SmallProduct,
)
from ingot.layers.products.product_choice import Step

ProductsOf = Callable[[Step], Sequence[LayerProducts]]
PLAIN = {"every step": "module by module"}  # if nothing is fused
NAMES = ("qkv", "output", "up", "down")
MOST_ROWS = 257  # of decode steps; larger ones are like the last
_WORDS = {
    SmallProduct: "small kernels",
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
    products = [(name, getattr(layer, name)) for layer in layers for name in NAMES]
    for layer in layers:
        products += zip(("encoded query", "encoded output"), layer.encoded or (), strict=False)
    for name, product in [*products, ("head", layers[-1].after)]:
        word = _WORDS.get(type(product)) or _of_module(product, step)
        if product.linear.scheme.input_dtype == E4M3:
            word = _of_fp8(name, product, step)
        if name == "up" and apart and isinstance(product, SmallProduct):
            word += ", activation apart"
        by_kernel.setdefault(word, {})[name] = None
    if len(by_kernel) == 1:
        return next(iter(by_kernel))
    return "; ".join(f"{', '.join(names)}: {word}" for word, names in by_kernel.items())


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
