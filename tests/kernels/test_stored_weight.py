"""Weights of 8 and of 4 bits: their layout, and every small product of them against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.activation.plain_activation import Plain, plain_activation
from ingot.kernels.product.few_rows.small_gate_up import small_gate_up
from ingot.kernels.product.few_rows.small_linear import small_linear, small_linear_parts
from ingot.kernels.weight.stored_weight import (
    StoredWeight,
    dequantized,
    num_words,
    pack_words,
    stored,
    symmetric_zero,
    unpacked,
)
from ingot.quant.schemes.plain_unpacking import meaning
from tests.kernels.flat_calls import small_qkv, small_qkv_reference, small_qkv_triton
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal
from tests.kernels.test_small_products import EPS, NARROW, normed64, qkv_arguments, weights

# bits, group (0: a scale a row), with zeros
FORMS = [
    (8, 0, False),
    (8, 64, True),
    (8, 128, False),
    (4, 0, False),
    (4, 0, True),
    (4, 32, False),
    (4, 64, True),
    (4, 128, True),
    (4, 256, False),
]


def random_weight(
    form: tuple[int, int, bool], outputs: int, width: int, dtype: torch.dtype, device: str
) -> StoredWeight:
    """Random numbers of a form with scales that keep products of order one."""
    bits, group, with_zeros = form
    generator = torch.Generator().manual_seed(outputs + width)
    shape = (-(-width // group), outputs) if group else (outputs,)
    scales = (torch.rand(shape, generator=generator) + 0.5) / width**0.5 / (1 << (bits - 2))
    zeros = torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8) if with_zeros else None
    numbers = torch.randint(0, 1 << bits, (outputs, width), generator=generator, dtype=torch.uint8)
    middle = torch.full((outputs,), symmetric_zero(bits), dtype=torch.uint8)
    values = pack_words(numbers, bits, group, middle if zeros is None else zeros.view(-1, outputs)[-1])
    own = (values, scales.to(dtype), zeros)
    values, scales, zeros = (None if t is None else t.to(device) for t in own)
    assert values is not None
    return StoredWeight(values, width, scales, zeros, bits, group)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_two_ways_of_unpacking_agree(form: tuple[int, int, bool], dtype: torch.dtype) -> None:
    """The proof's own is to the bit that of the kernels' twins; with columns in another order, too."""
    for outputs, width in ((18, 200), (33, 1500)):
        weight = random_weight(form, outputs, width, torch.float16, "cpu")
        assert torch.equal(meaning(weight, dtype), dequantized(weight, dtype))
        order = torch.randperm(width, generator=torch.Generator().manual_seed(1)).int()
        moved = replace(weight, order=order)
        assert torch.equal(meaning(moved, dtype), dequantized(moved, dtype))


@pytest.mark.parametrize("form", FORMS)
def test_layout(form: tuple[int, int, bool]) -> None:
    """Every number is where the layout says, and means what the formula says."""
    weight = random_weight(form, 18, 200, torch.float16, "cpu")
    bits, group, _ = form
    wide = dequantized(weight, torch.float64)
    assert weight.bits == bits
    assert wide.shape == (18, 200)
    assert weight.scales is not None
    for row, column in ((0, 0), (2, 37), (17, 131), (11, 199)):
        width = min(group or 64, 64)
        chunk = 16 // bits * width
        part, word = column % chunk // width, column // chunk * width + column % width
        thread, half = row % 16 // 2 * 4 + word % 32 // 8, word % 8 // 4  # of a piece: 16 rows by 32 words
        piece = row // 16 * 16 * weight.values.shape[1] + word // 32 * 512
        flat = piece + half * 256 + thread * 8 + row % 2 * 4 + word % 4
        number = (int(weight.values.view(-1)[flat]) & 0xFFFF) >> bits * part & ((1 << bits) - 1)
        place = (column // group, row) if group else (row,)
        zero = (128 if bits == 8 else 8) if weight.zeros is None else int(weight.zeros[place])
        assert float(wide[row, column]) == (number - zero) * float(weight.scales[place])


def test_words_and_back() -> None:
    for bits in (4, 8):
        numbers = torch.randint(0, 1 << bits, (3, 150), dtype=torch.uint8)
        for group in (0, 32, 64, 128):
            words = pack_words(numbers, bits, group, torch.full((3,), 8, dtype=torch.uint8))
            assert words.shape == (16, num_words(150, bits, group))
            scales = torch.ones(-(-150 // group), 3) if group else torch.ones(3)
            assert torch.equal(unpacked(StoredWeight(words, 150, scales, None, bits, group)), numbers)


def check_linear(
    impl: Implementation, x: torch.Tensor, weight: StoredWeight, tiles: dict[str, int], parts: dict[str, int],
    atol: float = 1e-4,
) -> None:  # fmt: skip
    """Bias and residual with ``tiles``, and ``parts`` of the sums, against float64."""
    outputs, given = weight.out_features, {"dtype": x.dtype, "device": impl.device}
    bias, residual = normal(outputs, seed=3, **given), normal(len(x), outputs, seed=4, **given)
    y = impl(small_linear)(x, weight, bias, residual, tiles=tiles)
    product = x.double() @ dequantized(weight, torch.float64).T
    assert_near(y, product + bias.double() + residual.double())
    sums = impl(small_linear_parts)(x, weight, parts)
    torch.testing.assert_close(sums.double().sum(0), product, rtol=1e-4, atol=atol)


def check_gate_up(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], rows: int, outputs: int,
    tiles: dict[str, int],
) -> None:  # fmt: skip
    """With a norm, against float64."""
    x = normal(rows, 160, dtype=dtype, device=impl.device)
    weight = random_weight(form, outputs, 160, dtype, impl.device)
    g = normal(160, dtype=dtype, device=impl.device, seed=2)
    y = impl(small_gate_up)(x, weight, g, EPS, tiles=tiles)
    gate, up = (normed64(x, g) @ dequantized(weight, torch.float64).T).chunk(2, dim=1)
    assert_near(y, gate * torch.sigmoid(gate) * up, loosen=2)


def check_qkv(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], case: str, rows: int,
    tiles: dict[str, int],
) -> None:  # fmt: skip
    """The same as the twin with a dense weight of the same values, exact in fp32, else rounded as the test's
    tolerance allows; the kernels' own tests have the formulas.
    """
    arguments, options = qkv_arguments(case, dtype, impl.device, rows)
    outputs, width = arguments[1].shape
    weight = random_weight(form, outputs, width, dtype, impl.device)
    quantized, dense = [*arguments], [*arguments]
    quantized[1], dense[1] = weight, dequantized(weight, dtype)
    caches = [[t.clone() for t in arguments[9:11]] for _ in range(2)]
    quantized[9:11], dense[9:11] = caches
    y = impl(small_qkv, small_qkv_triton)(*quantized, **options, tiles=tiles)
    expected = small_qkv_reference(*dense, **options)
    assert_near(y, expected.double(), loosen=4)
    for ours, theirs in zip(*caches, strict=True):
        assert_near(ours, theirs.double(), loosen=4)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 37, 200), (9, 20, 128)])
def test_small_linear(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], rows: int, outputs: int, width: int
) -> None:
    x = normal(rows, width, dtype=dtype, device=impl.device)
    weight = random_weight(form, outputs, width, dtype, impl.device)
    check_linear(impl, x, weight, NARROW, NARROW | {"SPLITS": 2, "BLOCK_T": 64})


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_small_gate_up(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], prefetch: int
) -> None:
    for rows in (1, 5):
        check_gate_up(impl, dtype, form, rows, 42, NARROW | {"PREFETCH": prefetch, "PROGRAMS": 3})


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5])
def test_small_qkv(impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], rows: int) -> None:
    for case in ("qwen", "partial"):
        check_qkv(impl, dtype, form, case, rows, NARROW)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(("rows", "bits"), [(1, 16), (5, 16), (16, 16), (1, 8), (5, 8)])
def test_a_product_ends_in_its_activation(
    impl: Implementation, dtype: torch.dtype, activation: Plain, rows: int, bits: int
) -> None:
    """Of the product as it would be stored: by PyTorch's activation of the same launch without one."""
    x, w = normal(rows, 128, dtype=dtype, device=impl.device), stored(weights(48, 128, dtype, impl.device))
    if bits < 16:
        w = random_weight((bits, 0, False), 48, 128, dtype, impl.device)
    bias = normal(48, dtype=dtype, device=impl.device, seed=3)
    op = impl(small_linear)
    y, plain = op(x, w, bias, activation=activation), op(x, w, bias)
    torch.testing.assert_close(y, plain_activation(plain, activation), rtol=2**-10, atol=1e-5)
    assert not torch.equal(y, plain)


def test_refused() -> None:
    x = torch.zeros(2, 64)
    good = random_weight((4, 32, True), 8, 64, torch.float32, "cpu")
    assert good.scales is not None
    with pytest.raises(IngotError, match="another width"):
        small_linear(torch.zeros(2, 32), good)
    with pytest.raises(IngotError, match="scales has the wrong shape"):
        small_linear(x, StoredWeight(good.values, 64, good.scales[0], good.zeros, 4, 32))
    with pytest.raises(IngotError, match="unsupported group size"):
        small_linear(x, StoredWeight(good.values, 64, good.scales, good.zeros, 4, 48))
    with pytest.raises(IngotError, match="has no scales"):
        small_linear(x, StoredWeight(torch.zeros(8, 64, dtype=torch.int16), 64, bits=8))
    with pytest.raises(IngotError, match="zeros has the wrong dtype"):
        small_linear(x, StoredWeight(good.values, 64, good.scales, good.scales, 4, 32))
