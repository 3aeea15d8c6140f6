"""One product in fewer bits, as the engine computes it and as PyTorch's own kernels do.

for name, make in sides("qkv", 12288, 4096, rows=16, device="cuda"):
    first = make().calls()[0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.product.few_rows.small_gate_up import small_gate_up
from ingot.kernels.product.few_rows.small_linear import small_linear, small_linear_parts
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.product.packed.packed_matmul import (
    FloatRows,
    packed_matmul,
    packed_matmul_parts,
    takes_operand,
)
from ingot.kernels.rows.int8_rows import Int8Sums, Int8Weight, int8_product, quantize_rows
from ingot.kernels.rows.operand_rows import operand_rows
from ingot.kernels.tiles.int8_tiles import DECODE_ROWS
from ingot.kernels.tiles.packed_tiles import PACKED_ROWS, packed_splits
from ingot.kernels.tiles.product_tiles import FRAGMENT_ROWS
from ingot.kernels.weight.stored_weight import StoredWeight, dequantized
from ingot.quant.quantized_values import Quantized
from ingot.quant.schemes.weight_only import WeightOnly

GROUP, HEAD_DIM = 128, 128
SPLIT = ("o", "down")  # a norm that adds up parts comes after them
INNER_K_TILES = 8  # of PyTorch's layout of 4 bits
LIBRARY_ROWS = 32  # torch._int_mm takes more than 16
COPIES_BYTES = 256 << 20  # of weights in turn, so that none comes from L2
Call = Callable[[], Any]


@dataclass(frozen=True)
class Side:
    """One way to a product.

    Attributes:
        name: the format, and whose it is.
        how: the kernel.
        tensors: one weight's, which ``call`` takes: a copy of them for each turn.
        call: the product by a weight.
        wanted: makes [M, N] that the call must give, in plain PyTorch in fp32.
        given: brings a call's result into that form.
        int8: the tensor cores multiply numbers of 8 bits.
    """

    name: str
    how: str
    tensors: tuple[torch.Tensor, ...]
    call: Callable[..., Any]
    wanted: Callable[[], torch.Tensor]
    given: Callable[[Any], torch.Tensor] = torch.Tensor.float
    int8: bool = False

    @property
    def weight_bytes(self) -> int:
        """Of numbers, scales and zeros."""
        return sum(t.nbytes for t in self.tensors)

    def calls(self, most: int = 64) -> list[Call]:
        """Calls that take copies of the weight in turn."""
        count = max(2, min(-(-COPIES_BYTES // self.weight_bytes), most))
        copies = [self.tensors, *(tuple(t.clone() for t in self.tensors) for _ in range(count - 1))]
        return [lambda own=own: self.call(*own) for own in copies]


def apart(side: Side, result: Any) -> float:
    """How far a call's result is from what it must be, relative to it."""
    wanted = side.wanted()
    return float((side.given(result) - wanted).norm() / wanted.norm())


def sides(
    shape: str, outputs: int, width: int, rows: int, device: str
) -> Iterator[tuple[str, Callable[[], Side]]]:
    """(name, what makes the side): one at a time in memory; making one may fail, as PyTorch's layouts do."""
    x = torch.randn(rows, width, device=device).half()
    yield "fp16, F.linear", lambda: _dense(x, outputs)
    for name, bits, symmetric in (("w8a16", 8, True), ("w4a16", 4, False), ("w4a16 symmetric", 4, True)):
        yield name, lambda n=name, b=bits, s=symmetric: _weight_only(n, shape, x, outputs, b, s)
    yield "w8a8", lambda: _int8(shape, x, outputs)
    yield "w8a8, torch._int_mm", lambda: _int_mm(x, outputs)
    yield "w4a16, torch._weight_int4pack_mm", lambda: _int4pack(x, outputs)
    yield "w8a16, torch._weight_int8pack_mm", lambda: _int8pack(x, outputs)


def _step(width: int, bits: int) -> float:
    """Of a weight's numbers, so that outputs are of order one."""
    return 1.28 / width**0.5 / (4.6 if bits == 4 else 74)


def _scales(shape: tuple[int, ...], step: float, device: torch.device) -> torch.Tensor:
    """Scales that fp16 and bf16 both hold."""
    return (torch.rand(shape, device=device).add_(0.5) * step).bfloat16()


def _numbers(outputs: int, width: int, device: torch.device) -> torch.Tensor:
    """Random numbers of 8 bits, as normal activations and weights have them."""
    return (torch.randn(outputs, width, device=device) * 40).round_().clamp_(-127, 127).to(torch.int8)


def _dense(x: torch.Tensor, outputs: int) -> Side:
    weight = torch.randn(outputs, x.shape[1], device=x.device).mul_(x.shape[1] ** -0.5).half()
    return Side("fp16", "F.linear", (weight,), lambda w: F.linear(x, w), lambda: x.float() @ weight.float().T)


def _four_bits(x: torch.Tensor, outputs: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Numbers uint8 [N, K], scales and zeros [groups, N]."""
    groups = (x.shape[1] // GROUP, outputs)
    numbers = torch.randint(0, 16, (outputs, x.shape[1]), dtype=torch.uint8, device=x.device)
    zeros = torch.randint(6, 10, groups, dtype=torch.uint8, device=x.device)
    zeros = torch.full_like(zeros, 8) if symmetric else zeros
    return numbers, _scales(groups, _step(x.shape[1], 4), x.device), zeros


def _weight_only(name: str, shape: str, x: torch.Tensor, outputs: int, bits: int, symmetric: bool) -> Side:
    """Up to ``PACKED_ROWS`` rows by the kernel of a decode step, then widened for the matrix library."""
    zeros: torch.Tensor | None = None
    if bits == 4:
        numbers, scales, zeros = _four_bits(x, outputs, symmetric)
        zeros = None if symmetric else zeros
    else:
        numbers = (_numbers(outputs, x.shape[1], x.device).to(torch.int16) + 128).to(torch.uint8)
        scales = _scales((outputs,), _step(x.shape[1], 8), x.device)
    scheme = WeightOnly(bits, GROUP if bits == 4 else 0, symmetric)
    tensors = scheme.accept(Quantized(numbers, scales.half(), zeros, bits, scheme.group))
    stored = scheme.stored(tensors, x.shape[1])
    widened = x.shape[0] > PACKED_ROWS
    how, product, given = _decode_kernel(shape, x, stored)
    if widened:
        how, given = "dequantize, F.linear", torch.Tensor.float

    def call(*own: torch.Tensor) -> Any:
        named = dict(zip(tensors, own, strict=True))
        return scheme.apply(x, named) if widened else product(scheme.stored(named, x.shape[1]))

    def wanted() -> torch.Tensor:
        y = x.float() @ dequantized(stored, torch.float32).T
        return silu_mul(y) if how == "small_gate_up" else y

    return Side(name, how, tuple(tensors.values()), call, wanted, given)


def _decode_kernel(
    shape: str, x: torch.Tensor, weight: StoredWeight
) -> tuple[str, Callable[[StoredWeight], Any], Callable[[Any], torch.Tensor]]:
    """The kernel that a decode step takes; QKV's without its rotary embedding and cache write."""
    if x.shape[0] > FRAGMENT_ROWS:
        split = shape in SPLIT
        ordered = takes_operand(x.shape[0], weight, x.device, split)
        rows: FloatRows = operand_rows(x) if ordered else x
        if split or (shape == "qkv" and packed_splits(x.shape[0], weight, x.device, ordered) > 1):
            return "packed_matmul_parts", lambda w: packed_matmul_parts(rows, w), lambda parts: parts.sum(0)
        return "packed_matmul", lambda w: packed_matmul(rows, w), torch.Tensor.float
    if shape == "gate_up":
        return "small_gate_up", lambda w: small_gate_up(x, w), torch.Tensor.float
    if shape in SPLIT:
        return "small_linear_parts", lambda w: small_linear_parts(x, w), lambda parts: parts.sum(0)
    return "small_linear", lambda w: small_linear(x, w), torch.Tensor.float


def _int8_weight(x: torch.Tensor, outputs: int) -> Int8Weight:
    scales = _scales((outputs,), _step(x.shape[1], 8), x.device).float()
    return Int8Weight(_numbers(outputs, x.shape[1], x.device), scales)


def _int8(shape: str, x: torch.Tensor, outputs: int) -> Side:
    """Activations in 8 bits as the kernel before leaves them: attention's by heads, others by rows."""
    rows, weight = quantize_rows(x, HEAD_DIM if shape == "o" else 0), _int8_weight(x, outputs)
    split = shape in SPLIT and x.shape[0] <= DECODE_ROWS

    def call(values: torch.Tensor, scales: torch.Tensor) -> Any:
        own = replace(weight, values=values, scales=scales)
        return int8_linear_parts(rows, own) if split else int8_linear(rows, own, torch.float16)

    def wanted() -> torch.Tensor:
        return int8_product(rows, weight, torch.float32)

    how = "int8_linear_parts" if split else "int8_linear"
    return Side("w8a8", how, (weight.values, weight.scales), call, wanted, _summed, int8=True)


def _summed(result: Int8Sums | torch.Tensor) -> torch.Tensor:
    """A product of 8 bits, of parts or whole."""
    if isinstance(result, Int8Sums):
        return result.product()
    return result.sum(0) if result.dim() == 3 else result.float()


def _int_mm(x: torch.Tensor, outputs: int) -> Side:
    """Exact sums alone, without scales."""
    rows, weight = quantize_rows(x), _int8_weight(x, outputs)
    short = max(LIBRARY_ROWS - x.shape[0], 0) if x.shape[0] <= 16 else 0
    padded = F.pad(rows.values, (0, 0, 0, short))
    how = "torch._int_mm" + (f", padded to {LIBRARY_ROWS} rows" if short else "")

    def wanted() -> torch.Tensor:
        return rows.values.float() @ weight.values.float().T

    def given(sums: torch.Tensor) -> torch.Tensor:
        return sums[: x.shape[0]].float()

    def call(own: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(padded, own.T)

    return Side("w8a8", how, (weight.values,), call, wanted, given, int8=True)


def _int4pack(x: torch.Tensor, outputs: int) -> Side:
    """PyTorch's product of 4 bits, bf16: W = (q - 8) · scale + zero; both [groups, N, 2] side by side.

    Raises:
        RuntimeError: PyTorch has no such layout here.
    """
    x = x.bfloat16()
    numbers, scales, zeros = _four_bits(x, outputs, symmetric=False)
    both = torch.stack([scales, (8 - zeros.float()).mul_(scales).bfloat16()], dim=-1).contiguous()
    if x.device.type == "cpu":  # another layout; a dry run checks what scales and zeros mean
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), INNER_K_TILES)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
    else:
        pairs = numbers[:, ::2] << 4 | numbers[:, 1::2]
        packed = torch._convert_weight_to_int4pack(pairs.contiguous(), INNER_K_TILES)
        product = torch._weight_int4pack_mm

    def call(own: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
        return product(x, own, GROUP, constants)

    def wanted() -> torch.Tensor:
        steps, offsets = (t.float().T.repeat_interleave(GROUP, 1) for t in both.unbind(-1))
        return x.float() @ ((numbers.float() - 8) * steps + offsets).T

    return Side("w4a16", "torch._weight_int4pack_mm, bf16", (packed, both), call, wanted)


def _int8pack(x: torch.Tensor, outputs: int) -> Side:
    """PyTorch's product of 8 bits, a scale a row, bf16."""
    x = x.bfloat16()
    weight = _int8_weight(x, outputs)
    scales = weight.scales.bfloat16()

    def call(own: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(x, own, constants)

    def wanted() -> torch.Tensor:
        return x.float() @ weight.values.float().T * scales.float()

    return Side("w8a16", "torch._weight_int8pack_mm, bf16", (weight.values, scales), call, wanted)
