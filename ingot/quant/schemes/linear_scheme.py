"""The seam between a linear layer and its number format: all that anyone asks of a scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn

import torch

from ingot.kernels.rows.block_rows import BlockSteps
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.weight.int4_weight import AnyInt8
from ingot.kernels.weight.stored_weight import PIECE, StoredWeight
from ingot.quant.quantized_values import InBlocks, Quantized, Values

Tensors = Mapping[str, torch.Tensor | None]
InputForm = Literal["dense", "int8", "blocks"]
PIECE_BYTES = 8  # per value of a weight's piece: its part of the words, the quantized value, the product


@dataclass(frozen=True, slots=True)
class WeightGrid:
    """How a weight is rounded; arguments of ``quantize``."""

    bits: int
    group: int
    symmetric: bool


@dataclass(frozen=True, slots=True)
class BlockTensors:
    """A layer as products by blocks read it: the input's scales, the weight [N, whole blocks], shift [N]."""

    steps: BlockSteps
    weight: Int8Weight
    shift: torch.Tensor


class LinearScheme(ABC):
    """Stores y = x · Wᵀ + b, W [out_features, in_features], as named tensors and computes it from them.

    Attributes:
        form: in which its products take their input: rows in the model's dtype, rows in 8 bits with scales,
            or int8 rows by blocks of channels.
        dense: whether the weight is a matrix for the matrix library.
        small_products: whether the small kernels may multiply by ``stored`` in the scheme's place.
        fixed: the floating-point tensors that keep their dtype when a model computes in another.
        by_place: whether rounding depends on which channel is where.
        packs_fp32: whether weights are packed from fp32, whatever the engine's dtype.
        input_dtype: of quantized rows, int8 or e4m3.
        static: whether activations have one scale, the tensor ``input_scale``.
        input_group: neighbouring activations that share a scale; 0: the whole row.
        grouped_input: whether every input has these groups; otherwise they are an attention's heads.
        ordered: whether the input's channels are gathered in another order, the tensor ``order``.
    """

    form: ClassVar[InputForm] = "dense"
    dense: ClassVar[bool] = False
    fixed: ClassVar[frozenset[str]] = frozenset()
    by_place: ClassVar[bool] = False
    packs_fp32: ClassVar[bool] = False
    input_dtype: ClassVar[torch.dtype] = torch.int8

    @property
    @abstractmethod
    def name(self) -> str:
        """As in ``QuantConfig``."""

    @property
    def small_products(self) -> bool:
        return False

    @property
    def static(self) -> bool:
        return False

    @property
    def input_group(self) -> int:
        return 0

    @property
    def grouped_input(self) -> bool:
        return False

    @property
    def ordered(self) -> bool:
        return False

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded to few bits."""
        return self.form != "dense"

    @property
    def splits(self) -> bool:
        """Whether products round an input in fp32 to 23 bits, three int8 parts."""
        return False

    def placing_rows(self, device: torch.device) -> int:
        """Up to how many rows a QKV product of form ``int8`` writes queries and the cache itself."""
        return MAX_ROWS

    # What is stored.

    def layout(
        self, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Empty tensors (on the current default device) of the stored shapes and dtypes."""
        tensors = self._layout(out_features, in_features, dtype)
        return tensors | ({"bias": torch.empty(out_features, dtype=dtype)} if bias else {})

    @abstractmethod
    def _layout(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """``layout`` without the bias."""

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, input_scale: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The stored form of the values nearest to a weight [N, K], in the order of ``layout``.

        ``input_scale``: fp32 [1], of ``static`` activations. Raises BuildError where a weight is not finite,
        or what the scheme needs of calibration is missing.
        """
        return self.accept(self.quantize(weight), bias, input_scale)

    def accept(
        self, found: Values, bias: torch.Tensor | None = None, input_scale: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The stored form of values that are chosen already; arguments and errors are as of ``pack``."""
        tensors = self._stored_values(found, bias, input_scale)
        return tensors if bias is None else tensors | {"bias": bias}

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> Values:
        """The values nearest to a weight [N, K]."""

    @abstractmethod
    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """``accept`` without the bias, which may be part of other tensors too."""

    def compensated(self, weight: torch.Tensor, hessian: torch.Tensor) -> Quantized:
        """The values of a weight [N, K] by GPTQ; ``hessian`` [K, K] is the mean of x·xᵀ of its inputs."""
        self._lacks("GPTQ")

    @property
    def grid(self) -> WeightGrid:
        """How AWQ rounds its weights."""
        self._lacks("AWQ")

    def drawn(
        self, out_features: int, in_features: int, std: float, generator: torch.Generator
    ) -> InBlocks | None:
        """Random values, on the generator's device, where packing random weights would need samples."""
        return None

    # What it means.

    @abstractmethod
    def dequantize(self, tensors: Tensors, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        """W [out_features, in_features] that ``apply`` multiplies by, in plain PyTorch, without a kernel."""

    def rounded(self, x: torch.Tensor, tensors: Tensors, *, flips: bool = False) -> torch.Tensor:
        """What an input [..., K] means after rounding, without a kernel; ``flips`` as in ``rounded_rows``."""
        return x

    def dequantize_input(
        self, rows: Int8Rows, tensors: Tensors, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What quantized rows mean, channels as in ``like`` [T, K], and their scales, which broadcast."""
        self._lacks("quantized input")

    # How it multiplies.

    @abstractmethod
    def apply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """y [..., out_features] for x [..., in_features]."""

    @abstractmethod
    def batch_invariant(self) -> LinearScheme:
        """The scheme that computes from the same tensors so that no row's bits depend on other rows."""

    def stored(self, tensors: Tensors, in_features: int) -> StoredWeight:
        """Of form ``dense``: the weight as the small kernels read it; of a scheme without ``small_products``
        the weight that it stands for, in fp32.
        """
        if self.rounds:
            self._lacks("weight for products of dense rows")
        return StoredWeight(self.dequantize(tensors, in_features, torch.float32), in_features)

    def unpacks_prompts(self, tensors: Tensors, in_features: int) -> bool:
        """Whether a kernel multiplies many rows by the values as they are stored, where the tensors lie."""
        return False

    def quantize_input(self, x: torch.Tensor, tensors: Tensors) -> Int8Rows:
        """Activations [M, K] in few bits."""
        self._lacks("quantized input")

    def int8_weight(self, tensors: Tensors, in_features: int, rows: int = 0) -> AnyInt8:
        """What int8 products of so many ``rows`` multiply by (0: of any number, whole rows of int8); of int8
        ``values`` [N, K] has rows of a multiple of 16 bytes.
        """
        self._lacks("weight for int8 products")

    def plain_weight(self, tensors: Tensors, in_features: int) -> Int8Weight:
        """The weight [N, K] in 8 bits, without a kernel, in the order of ``gathered``."""
        self._lacks("weight for int8 products")

    def gathered(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """x [T, K] with its channels in the order of ``plain_weight``."""
        return x

    def block_tensors(self, tensors: Tensors) -> BlockTensors:
        """Of form ``blocks``: views of the tensors."""
        self._lacks("product by blocks")

    def workspace_bytes(
        self, out_features: int, in_features: int, tokens: int, dtype: torch.dtype, *, kernels: bool
    ) -> int:
        """Bytes that a product of so many tokens holds besides its input and output at most, by a GPU's
        ``kernels`` or on a CPU: of a weight that is widened for a step, a piece of it on a CPU.
        """
        values = out_features * in_features
        return values * dtype.itemsize if kernels else min(values, PIECE) * PIECE_BYTES

    def _lacks(self, what: str) -> NoReturn:
        raise AssertionError(f"{self.name} has no {what}")


class LoadedForm(LinearScheme):
    """What a loaded weight is multiplied by in the place of ``origin``, which stores it: no file has it."""

    origin: LinearScheme

    @property
    def name(self) -> str:
        return self.origin.name

    @property
    def ordered(self) -> bool:
        return self.origin.ordered

    @property
    def packed_bytes(self) -> int:
        """Bytes of what is held beside the tensors."""
        return 0

    def _layout(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        self._lacks("layout of a file")

    def quantize(self, weight: torch.Tensor) -> Values:
        self._lacks("quantized values")

    def _stored_values(
        self, found: Values, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        self._lacks("quantized values")


def tensor_of(tensors: Tensors, name: str) -> torch.Tensor:
    tensor = tensors[name]
    assert tensor is not None
    return tensor
