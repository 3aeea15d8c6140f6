"""Which kernels a decoder's steps run on, in words.

Owns the words for products, and the ranges of rows that share them. Chooses nothing.

    describe_kernels(decoder, Ways(decoder, caches))     # {"decode, 1 to 8 requests": "small kernels", …}
"""

from __future__ import annotations

from collections.abc import Iterator

from ingot.layers.decoder import Decoder
from ingot.layers.decoder_forward import Operations
from ingot.layers.layer_products import (
    AddedProduct,
    BlockProduct,
    Int8Product,
    PackedProduct,
    Product,
    SmallProduct,
)
from ingot.layers.product_choice import Step, Ways

PLAIN = {"every step": "module by module"}  # where nothing is fused
NAMES = ("qkv", "output", "up", "down")
MOST_ROWS = 257  # of decode steps; more do as these
_WORDS = {
    SmallProduct: "small kernels",
    PackedProduct: "packed kernels",
    Int8Product: "int8 kernels",
    BlockProduct: "int8 kernels by blocks",
    AddedProduct: "matrix library",
}


def describe_kernels(decoder: Decoder, ways: Ways) -> dict[str, str]:
    """What computes the products of fused steps: by numbers of requests that all decode, and of prompts."""
    found: dict[str, str] = {}
    first, before = 1, ""
    for rows in range(1, MOST_ROWS + 1):
        now = _of_step(decoder, ways, Step(decodes=True, rows=rows))
        if now != before and before:
            found[_range(first, rows - 1)] = before
            first = rows
        before = now
    found[f"decode, {first} requests and more"] = before
    return found | {"with prompts": _of_step(decoder, ways, Step(decodes=False))}


def _range(first: int, last: int) -> str:
    many = f"{first} to {last} requests" if last > first else f"{first} request{'s' if first > 1 else ''}"
    return f"decode, {many}"


def _of_step(decoder: Decoder, ways: Ways, step: Step) -> str:
    """Products by kernel: ``qkv, up: packed kernels; head: small kernels``."""
    by_kernel: dict[str, dict[str, None]] = {}
    apart = decoder.config.gated and decoder.config.activation != "silu"
    for name, product in _products(Operations(decoder, ways, step)):
        word = _word(product)
        if name == "up" and apart and isinstance(product, SmallProduct):
            word += ", activation apart"
        by_kernel.setdefault(word, {})[name] = None
    if len(by_kernel) == 1:
        return next(iter(by_kernel))
    return "; ".join(f"{', '.join(names)}: {word}" for word, names in by_kernel.items())


def _products(operations: Operations) -> Iterator[tuple[str, Product]]:
    for layer in operations.layers:
        yield from ((name, getattr(layer, name)) for name in NAMES)
        yield from zip(("encoded query", "encoded output"), layer.encoded or (), strict=False)
    yield "head", operations.layers[-1].after


def _word(product: Product) -> str:
    word = _WORDS.get(type(product))
    return word or ("matrix library" if product.linear.scheme.dense else "weights widened per step")
