"""Products of few rows with weights loaded straight into the tensor cores' registers, against float64."""

from __future__ import annotations

import pytest
import torch

from ingot.kernels.product.few_rows.fragment_values import centre, excess, lift
from ingot.kernels.product.few_rows.small_linear import small_linear_parts
from ingot.kernels.tiles.product_tiles import settled, small_tiles, split_tiles
from ingot.kernels.weight.stored_weight import dequantized
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation, normal
from tests.kernels.test_stored_weight import check_gate_up, check_linear, check_qkv, random_weight

HALVES = (torch.float16, torch.bfloat16)
FORMS = [
    (8, 0, False),
    (8, 0, True),
    (4, 0, True),
    (4, 32, False),
    (4, 64, True),
    (4, 128, True),
    (4, 256, False),
]
CPU = torch.device("cpu")
# BLOCK_N, warps, FRAGMENTS (1: none ahead), parts of the sums
TILES = [(16, 2, 2, 1), (32, 4, 3, 2), (32, 8, 1, 1), (64, 2, 2, 4), (16, 1, 1, 1)]
NAMES = ("BLOCK_N", "num_warps", "FRAGMENTS", "SPLITS")


def chosen(tiles: tuple[int, ...], split: bool = False) -> dict[str, int]:
    """One of TILES, without its parts where an op has none."""
    choice = dict(zip(NAMES, tiles, strict=True))
    return choice if split else {name: choice[name] for name in NAMES[:3]}


def test_few_rows_of_whole_blocks_take_them() -> None:
    """And so the tests below mean what they say."""
    for form in FORMS:
        weight = random_weight(form, 96, 200, torch.float16, "cpu")
        assert small_tiles(5, weight, 2, CPU)["FRAGMENTS"] > 0
        assert split_tiles(5, weight, 2, CPU)["FRAGMENTS"] > 0
        assert not small_tiles(5, weight, 4, CPU)["FRAGMENTS"]
        assert not small_tiles(9, weight, 2, CPU)["FRAGMENTS"]
    for form, outputs, width in (((8, 64, True), 96, 200), ((4, 0, True), 90, 200), ((4, 0, True), 96, 204)):
        assert not small_tiles(5, random_weight(form, outputs, width, torch.float16, "cpu"), 2, CPU)[
            "FRAGMENTS"
        ]
    good = small_tiles(5, random_weight((4, 0, True), 96, 200, torch.float16, "cpu"), 2, CPU)
    for change in ({"BLOCK_N": 24}, {"PROGRAMS": 2}, {"BLOCK_T": 32}):
        assert not settled({**good, **change})["FRAGMENTS"]
    assert not settled({**good, "BLOCK_N": 48}, pairs=True)["FRAGMENTS"]


def test_the_numbers_of_a_word() -> None:
    """Where bit operations put them: 4 bits beyond 1024 in fp16, half of them sixteenfold, beyond 128 in
    bf16; 8 bits around 0.
    """
    import triton.language as tl

    assert [lift(i, 4, tl.float16) for i in range(4)] == [1.0, 16.0, 1.0, 16.0]
    assert [lift(i, 4, tl.bfloat16) for i in range(4)] == [1.0] * 4
    assert (excess(4, tl.float16), excess(8, tl.float16), excess(4, tl.bfloat16)) == (1024.0, 0.0, 128.0)
    assert excess(8, tl.bfloat16) == 0.0
    assert [centre(bits, dtype) for bits in (8, 4) for dtype in (tl.float16, tl.bfloat16)] == [128, 128, 0, 0]


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(("rows", "width"), [(1, 200), (7, 1016)])
def test_small_linear(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], tiles: tuple[int, ...],
    rows: int, width: int,
) -> None:  # fmt: skip
    outputs = tiles[0] + 16  # two programs, the second of which BLOCK_N of 32 and 64 leave half empty
    x = normal(rows, width, dtype=dtype, device=impl.device)
    weight = random_weight(form, outputs, width, dtype, impl.device)
    check_linear(impl, x, weight, chosen(tiles), chosen(tiles, split=True), atol=2e-4)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", [(8, 0, False), (4, 128, True)])
def test_rows_of_one_sign(impl: Implementation, form: tuple[int, int, bool]) -> None:
    """What is too much in the sums is largest there, and so what its subtraction leaves out."""
    x = normal(3, 4096, dtype=torch.float16, device=impl.device).abs() + 1
    weight = random_weight(form, 32, 4096, torch.float16, impl.device)
    parts = impl(small_linear_parts)(x, weight, chosen((32, 4, 1, 1)))
    expected = x.double() @ dequantized(weight, torch.float64).T
    assert ((parts.double().sum(0) - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("form", "dtype", "tiles", "rows", "width"),
    [
        ((4, 128, True), torch.float16, (16, 1, 2, 1), 7, 1016),  # one warp, four chunks, the last is short
        ((4, 64, True), torch.bfloat16, (32, 2, 2, 2), 3, 1272),  # parts of 2 and 3 chunks for 2 warps
        ((8, 0, True), torch.bfloat16, (32, 2, 3, 2), 1, 1272),
        ((4, 0, True), torch.float16, (32, 2, 2, 1), 8, 2048),
        ((4, 64, True), torch.float16, (16, 2, 1, 2), 7, 1272),  # as with FRAGMENTS 2
        ((8, 0, True), torch.float16, (32, 2, 1, 2), 5, 1272),  # loaded at their step
        ((4, 128, True), torch.float16, (16, 2, 2, 1), 11, 504),  # a tile of 16 rows of x
    ],
)
def test_words_on_their_way(
    impl: Implementation, form: tuple[int, int, bool], dtype: torch.dtype, tiles: tuple[int, ...],
    rows: int, width: int,
) -> None:  # fmt: skip
    """Loops with equal and unequal numbers of chunks per warp, and a last tile half empty."""
    x = normal(rows, width, dtype=dtype, device=impl.device)
    weight = random_weight(form, tiles[0] + 16, width, dtype, impl.device)
    wide = {"BLOCK_T": 16, "PROGRAMS": 0} if rows > 8 else {}
    check_linear(impl, x, weight, chosen(tiles) | wide, chosen(tiles, split=True) | wide, atol=2e-4)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_words_on_their_way_of_pairs(impl: Implementation) -> None:
    check_gate_up(impl, torch.float16, (4, 64, True), 3, 96, chosen((32, 1, 2, 1)))
    check_qkv(impl, torch.float16, (4, 64, True), "wide", 5, chosen((32, 2, 3, 1)))


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", [TILES[1], TILES[3]])
def test_small_gate_up(
    impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool], tiles: tuple[int, ...]
) -> None:
    for rows in (1, 8):
        check_gate_up(impl, dtype, form, rows, 96, chosen(tiles))


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_small_qkv(impl: Implementation, dtype: torch.dtype, form: tuple[int, int, bool]) -> None:
    for case, rows in (("qwen", 1), ("wide", 5)):
        check_qkv(impl, dtype, form, case, rows, chosen(TILES[1]))
