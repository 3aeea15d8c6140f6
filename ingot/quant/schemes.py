"""Linear schemes: what a linear layer stores and how it multiplies.

Owns the seam between a linear layer and its number format. Knows no model: a scheme sees one weight at a
time.

    scheme = make_scheme(QuantConfig())
    tensors = scheme.pack(weight, bias)          # at build
    y = scheme.apply(x, tensors)                 # at run
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from ingot.config.quant import QuantConfig
from ingot.config.schemes import SCHEMES
from ingot.kernels.invariant_linear import invariant_linear
from ingot.kernels.stored_weight import StoredWeight
from ingot.quant.activations import KeptActivations
from ingot.quant.int4_in_int8 import Int4InInt8
from ingot.quant.int8_blocks import Int8Blocks
from ingot.quant.int8_both import Int8Both
from ingot.quant.int8_products import Int8Products
from ingot.quant.rounding import Quantized
from ingot.quant.rptq import InBlocks
from ingot.quant.weight_only import InvariantWeightOnly, WeightOnly

Shape = tuple[int, ...]


class LinearScheme(Protocol):
    """Stores y = x · Wᵀ + b, W [out_features, in_features], as named tensors and computes it from them."""

    @property
    def name(self) -> str:
        """As in ``QuantConfig``."""
        ...

    @property
    def fixed(self) -> frozenset[str]:
        """The floating-point tensors that keep their dtype when a model computes in another."""
        ...

    def layout(
        self, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Empty tensors (on the current default device) of the stored shapes and dtypes."""
        ...

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        input_scale: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """The stored form of one layer's weights, in the order of ``layout``; ``input_scale`` is of static
        activations alone.
        """
        ...

    def accept(
        self,
        found: Quantized | InBlocks,
        bias: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """The stored form of quantized values that are chosen already."""
        ...

    def apply(self, x: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """y [..., out_features] for x [..., in_features]."""
        ...

    def dequantize(
        self, tensors: Mapping[str, torch.Tensor | None], in_features: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """W [out_features, in_features] that ``apply`` multiplies by, in plain PyTorch, without a kernel."""
        ...

    def batch_invariant(self) -> LinearScheme:
        """The scheme that computes from the same tensors so that no row's bits depend on other rows."""
        ...

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded to few bits."""
        ...

    @property
    def by_place(self) -> bool:
        """Whether rounding depends on which channel is where."""
        ...

    @property
    def packs_fp32(self) -> bool:
        """Whether weights are packed from fp32, whatever the engine's dtype."""
        ...

    @property
    def cancels(self) -> bool:
        """Whether sums have parts that take each other away, several times as large as their results."""
        ...

    def rounded(
        self, x: torch.Tensor, tensors: Mapping[str, torch.Tensor | None], *, flips: bool = False
    ) -> torch.Tensor:
        """What an input [..., K], fp32 or fp64, means after rounding, without a kernel; ``flips`` as in
        ``rounded_rows``.
        """
        ...

    def workspace_bytes(
        self, out_features: int, in_features: int, tokens: int, dtype: torch.dtype, *, kernels: bool
    ) -> int:
        """Bytes that a product of so many tokens holds besides its input and output at most, by a GPU's
        ``kernels`` or on a CPU.
        """
        ...


class Dense(KeptActivations):
    """Weights as they are, in the engine's dtype."""

    name = "none"
    fixed: frozenset[str] = frozenset()

    def layout(
        self, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """``weight`` [out_features, in_features] and, with a bias, ``bias`` [out_features]."""
        tensors = {"weight": torch.empty(out_features, in_features, dtype=dtype)}
        if bias:
            tensors["bias"] = torch.empty(out_features, dtype=dtype)
        return tensors

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        input_scale: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors themselves."""
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def accept(
        self,
        found: Quantized | InBlocks,
        bias: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Never: a dense weight is not quantized."""
        raise AssertionError("quantized values for a dense layer")

    def apply(self, x: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """x · Wᵀ + b by the matrix library."""
        weight = tensors["weight"]
        assert weight is not None
        return F.linear(x, weight, tensors.get("bias"))

    def stored(self, tensors: Mapping[str, torch.Tensor | None], in_features: int) -> StoredWeight:
        """The weight itself."""
        weight = tensors["weight"]
        assert weight is not None
        return StoredWeight(weight, in_features)

    def dequantize(
        self, tensors: Mapping[str, torch.Tensor | None], in_features: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The weight in another dtype."""
        return self.stored(tensors, in_features).values.to(dtype)

    def batch_invariant(self) -> InvariantDense:
        """The same weights, multiplied by a kernel of our own."""
        return InvariantDense()


class InvariantDense(Dense):
    """Weights as they are; y's rows have the same bits in any company, at some cost in speed."""

    def apply(self, x: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """x · Wᵀ + b, x [T, in_features]."""
        weight = tensors["weight"]
        assert weight is not None
        return invariant_linear(x, weight, tensors.get("bias"))

    def batch_invariant(self) -> InvariantDense:
        """Itself."""
        return self


def make_scheme(config: QuantConfig, input_group: int = 0, *, free_order: bool = False) -> LinearScheme:
    """The scheme of one linear layer, from ``QuantConfig.at`` its name.

    ``input_group``: neighbouring channels of its input that share a scale where activations are rounded by
    the scales that they come with; 0: all. ``free_order``: a product makes its input, whose channels a build
    may put in any order.
    """
    if config.scheme == "w8a8":
        static, per_tensor = config.activations == "static", config.weight_scales == "tensor"
        return Int8Both(static, per_tensor, 0 if static else input_group)
    if config.scheme == "w4a8":
        assert config.group is not None
        return Int4InInt8(config.group, input_group)
    info = SCHEMES[config.scheme]
    if info.in_blocks:
        assert config.group
        return Int8Blocks(info.weight_bits, info.input_bits, config.group, ordered=not free_order)
    if info.weight_only:
        assert config.group is not None
        return WeightOnly(
            config.scheme, info.weight_bits, config.group, bool(config.symmetric), config.act_order
        )
    return Dense()


def takes_small_products(scheme: LinearScheme) -> bool:
    """Whether the small kernels may multiply by a layer's weight in its scheme's place."""
    ordered = isinstance(scheme, WeightOnly) and scheme.ordered
    return isinstance(scheme, Dense | WeightOnly) and not ordered and not is_invariant(scheme)


def is_int8(scheme: LinearScheme) -> bool:
    """Whether a layer multiplies activations in 8 bits by quantized values of 8 bits (int8_products.py)."""
    return isinstance(scheme, Int8Products)


def in_blocks(scheme: LinearScheme) -> bool:
    """Whether a layer multiplies quantized values by blocks of columns (int8_blocks.py)."""
    return isinstance(scheme, Int8Blocks)


def is_dense(scheme: LinearScheme) -> bool:
    """Whether a layer's weight is a matrix for the matrix library."""
    return isinstance(scheme, Dense) and not is_invariant(scheme)


def is_invariant(scheme: LinearScheme) -> bool:
    """Whether the scheme is a batch-invariant form."""
    return isinstance(scheme, InvariantDense | InvariantWeightOnly)
