"""Which product each linear layer of a step takes, by its scheme, the step's rows, and the model's shape.

Each layer is chosen by itself, so schemes may be mixed.

    chooser = ProductChooser(config, dtype, caches, all_dense=True)
    product = chooser.product("o", layer.self_attn.o_proj, Step(decodes=True, rows=8))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.kernels.product.few_rows import stream_product
from ingot.kernels.product.few_rows.stream_product import takes_stream
from ingot.kernels.product.packed.packed_matmul import DTYPES as PACKED_DTYPES
from ingot.kernels.product.packed.packed_matmul import takes_operand
from ingot.kernels.product.packed.packed_prompt import takes_wide
from ingot.kernels.product.prompt_epilogue import is_hopper
from ingot.kernels.rows.operand_rows import OPERAND_SPAN
from ingot.kernels.tiles.int8_tiles import DECODE_ROWS
from ingot.kernels.tiles.packed_tiles import PACKED_ROWS
from ingot.kernels.tiles.product_tiles import FRAGMENT_ROWS, MAX_ROWS
from ingot.kernels.tiles.tile_tables import is_narrow
from ingot.layers.forward_batch import LayerCache
from ingot.layers.linear import Linear
from ingot.layers.norm import Norm
from ingot.layers.products.layer_products import (
    AddedProduct,
    BlockProduct,
    GatedProduct,
    Int8Product,
    OddProduct,
    PackedProduct,
    Product,
    PromptProduct,
    SmallProduct,
    StreamProduct,
)

ALL = frozenset({"qkv", "o", "gate_up", "down", "head"})
NONE = frozenset[str]()
# Up to how many rows which products of a decode step are by the small kernels; other dense ones are by the
# matrix library. Measured on an H200 in steps of a 7B model: benchmarks/decode_variants.py.
Table = Sequence[tuple[int, frozenset[str]]]
DENSE_ROWS: Table = ((32, ALL), (MAX_ROWS, ALL - {"qkv"}))
SMALL_QKV = range(6144, 8192)  # outputs of a QKV product that is small up to MAX_ROWS
# The same for weights of fewer bits; others up to PACKED_ROWS are by packed_matmul, and more multiply as
# modules, with widened weights. Measured likewise: benchmarks/narrow_variants.py.
NARROW_ROWS: Table = ((FRAGMENT_ROWS, ALL), (MAX_ROWS, frozenset({"head"})))
# Plain MLPs (GPT-2): with more rows the matrix library was as fast on an H200, except for the head: with an
# odd vocabulary size (Whisper) the library took 154 µs to read weights worth 25 µs.
PLAIN_ROWS: Table = ((8, ALL), (MAX_ROWS, frozenset({"head"})))
# Narrow ones: their launches take longer than their bytes, and the small kernels' overlap. Measured in steps
# of Whisper small and large-v3: benchmarks/narrow_steps.py.
PLAIN_NARROW_ROWS: Table = ((MAX_ROWS, ALL),)
# fp32 on a GPU: without tensor cores, so that only vector sums of one row are fast.
FULL_ROWS: Table = ((1, ALL),)


def small_products(rows: int, table: Table = DENSE_ROWS) -> frozenset[str]:
    """The products of a decode step of ``rows`` tokens that the small kernels compute."""
    return next((small for most, small in table if rows <= most), NONE)


def folds(config: DecoderConfig) -> bool:
    """Whether norms, rotary embedding, cache write and SiLU all fold into the products of few rows."""
    return _folds_norms(config) and config.gated and not (config.qk_norm or config.mlp_bias)


def _folds_norms(config: DecoderConfig) -> bool:
    """Whether a product of one row can apply the norm before it, and add to the hidden states."""
    skips = config.crosses  # then only some requests' rows are added (SkippingProduct)
    return config.norm == "rms_norm" and not (config.wide_norms or config.post_norms or skips)


@dataclass(frozen=True)
class Step:
    """A kind of step.

    Attributes:
        decodes: whether every request has one token.
        rows: tokens of a step that decodes; None: any number.
        fused: whether kernels may do more than a module; otherwise every module is called, and its hooks
            fire.
    """

    decodes: bool
    rows: int | None = None
    fused: bool = True


BY_MODULE = Step(decodes=False, fused=False)


def by_scheme(
    linear: Linear, dtype: torch.dtype, *, overlap: bool = False, splits: bool = False, places: bool = False
) -> Product:
    """The product for any number of rows in ``dtype``; arguments are as of ``Int8Product``."""
    if linear.scheme.form == "int8":
        return Int8Product(linear, dtype, overlap=overlap, splits=splits, places=places)
    if linear.scheme.form == "blocks":
        return BlockProduct(linear, dtype, overlap=overlap, splits=splits)
    return Product(linear, overlap=overlap)


class ProductChooser:
    """Chooses products for a decoder and its caches.

    Attributes:
        dtype: of the hidden states.
        dense, narrow: tables of rows.
        all_small: whether every layer is dense (``all_dense``), so that products of one token apply the norm
            before them.
        streams: whether the GPU can stream words through shared memory.
        all_stream: whether those of every layer do, so that products of one token apply the norm.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        caches: Sequence[LayerCache],
        *,
        all_dense: bool,
        layers: Sequence[Linear] = (),
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.cache = caches[0]
        self.dense: Table = DENSE_ROWS if config.gated else PLAIN_ROWS
        if self.dtype.itemsize == 4 and self.cache.keys.device.type != "cpu":
            self.dense = FULL_ROWS
        self.narrow: Table = NARROW_ROWS
        self.all_small = all_dense and config.gated and _folds_norms(config)
        self.streams = is_hopper(self.cache.keys.device)
        apply = self.streams and len(layers) > 0 and _folds_norms(config)
        self.all_stream = apply and all(self._streams(linear) for linear in layers)

    def product(self, name: str, linear: Linear, step: Step, norm: Norm | None = None) -> Product:
        """A layer's product; ``name``: one of ``ALL``; ``norm``: the norm before it, which it may apply."""
        if not step.fused:
            return Product(linear, fused=False)
        overlap = step.decodes
        if linear.scheme.rounds or not linear.scheme.small_products:
            few = step.rows is not None and step.rows <= DECODE_ROWS
            places = self._places(linear, step)
            return by_scheme(linear, self.dtype, overlap=overlap, splits=few, places=places)
        odd = linear.scheme.dense and linear.out_features % 8 and self.dtype.itemsize == 2
        if name == "head" and odd and not step.decodes:
            return OddProduct(linear)
        if step.rows is not None and (found := self._decoding(name, linear, step.rows, norm)) is not None:
            return found
        if name in ("o", "down") and linear.scheme.dense and not linear.has_bias:
            return AddedProduct(linear, overlap=overlap)
        if name == "gate_up" and self.config.gated and linear.scheme.dense and not linear.has_bias:
            return GatedProduct(linear, overlap=overlap)
        if name in ("o", "gate_up", "down") and linear.unpacks_prompts():
            return PromptProduct(linear, overlap=overlap)
        return Product(linear, overlap=overlap)

    def _decoding(self, name: str, linear: Linear, rows: int, norm: Norm | None) -> Product | None:
        """The product of few decoding rows by one of our kernels; None: by the matrix library."""
        if rows == 1 and name != "head" and self._streams(linear):
            normed = self.all_stream and linear.in_features == stream_product.NORMED_COLUMNS
            gates = self.config.mlp == "silu_gated" and not self.config.mlp_bias
            return StreamProduct(linear, norm=norm if normed else None, gates=gates)
        dense = linear.stored().bits == 16
        places = self.cache.scales is None and not self.config.qk_norm
        small = name in small_products(rows, self._table(linear, dense=dense))
        if name == "qkv" and dense and self.dense is DENSE_ROWS and rows <= MAX_ROWS:
            small |= linear.out_features in SMALL_QKV
        if small or (not dense and rows <= MAX_ROWS and not self._unpacks(linear)):
            return SmallProduct(
                linear,
                overlap=True,
                norm=norm if rows == 1 and self.all_small else None,
                places=places,
                gates=self.config.mlp == "silu_gated" and not self.config.mlp_bias,
                sums=not (dense and rows == 1),  # vector sums read whole rows at the speed of memory
            )
        if dense or rows > PACKED_ROWS or name == "head" or not self._unpacks(linear):
            return None
        whole = self.config.head_dim % OPERAND_SPAN == 0  # heads are whole spans of columns
        spans = {"o": whole, "down": self.config.gated}.get(name, True)
        device = self.cache.keys.device
        wide = name == "gate_up" and takes_wide(rows, self.dtype, linear.stored())
        ordered = spans and not wide and takes_operand(rows, linear.stored(), device, name in ("o", "down"))
        return PackedProduct(linear, overlap=True, ordered=ordered, wide=wide)

    def _table(self, linear: Linear, *, dense: bool) -> Table:
        if not dense:
            return self.narrow
        plain = self.dense is PLAIN_ROWS and is_narrow(linear.out_features, linear.in_features)
        return PLAIN_NARROW_ROWS if plain else self.dense

    def _streams(self, linear: Linear) -> bool:
        """Whether the weight's words stream through shared memory for a row alone."""
        scheme = linear.scheme
        if not self.streams or scheme.dense or scheme.rounds or not scheme.small_products:
            return False
        return takes_stream(linear.stored(), self.dtype)

    def _unpacks(self, linear: Linear) -> bool:
        """Whether packed_matmul supports the weight's dtype."""
        scales = linear.stored().scales
        return scales is not None and scales.dtype in PACKED_DTYPES

    def _places(self, linear: Linear, step: Step) -> bool:
        """Whether a QKV product in 8 bits writes the cache itself."""
        few = step.rows is not None and step.rows <= linear.scheme.placing_rows(self.cache.keys.device)
        return few and not self.config.qk_norm and self.cache.keys.dtype == self.dtype
