"""Every kernel builds for sm_90 on a machine that has none, fits it, multiplies and moves as it should."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.compile_gptq_cases import GPTQ_CASES
from tests.kernels.compile_hopper_cases import HOPPER_CASES, WINDOW_CASES
from tests.kernels.compile_report import (
    LIMIT,
    check_all_fit,
    check_int8_products,
    check_invariant_sums,
    check_lanes_agree,
    check_prompt_products,
    compiled_for,
)

pytestmark = [pytest.mark.timeout(LIMIT + 60), pytest.mark.slow]  # hundreds of kernels


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the compiler reports."""
    return compiled_for(90, tmp_path_factory.mktemp("triton"))


def test_every_kernel_compiles_and_fits(rows: list[dict[str, Any]]) -> None:
    check_all_fit(rows, 90)


def test_lanes_agree_on_their_sums(rows: list[dict[str, Any]]) -> None:
    check_lanes_agree(rows)


def test_registers_do_not_spill_on_sm_90(rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if "spill_bytes" in row]
    if not measured:
        pytest.skip("this Triton comes without cuobjdump")
    assert [row for row in measured if row["spill_bytes"] > 16] == []


def test_what_starts_early_waits_for_its_input(rows: list[dict[str, Any]]) -> None:
    early = [row for row in rows if row["overlap"] > 1]
    assert len(early) >= 40
    assert [row for row in early if not row["waits"]] == []
    assert "int8_matmul_kernel" in {row["kernel"] for row in early}


def test_products_of_many_rows_read_a_temporary_weight_after_the_wait(rows: list[dict[str, Any]]) -> None:
    """The kernel before may be the one that writes it; products of few rows ask for constants early."""
    early = [row for row in rows if row["overlap"] > 1]
    many = [row for row in early if row["kernel"] == "int8_matmul_kernel"]
    assert len(many) >= 10
    assert [row for row in many if row["early_reads"]] == []
    few = [row for row in early if row["case"] == "both in 8 bits 8 fp16 overlapping"]
    assert all(row["early_reads"] for row in few)


def test_numbers_of_8_bits_are_multiplied_as_such(rows: list[dict[str, Any]]) -> None:
    """Some by a whole warp group."""
    found = check_int8_products(rows, least=40)
    assert [name for row in found for name in row["products"] if name.startswith("wgmma")]


def test_ending_in_8_bits_changes_no_order_of_sums(rows: list[dict[str, Any]]) -> None:
    """A norm that ends in 8 bits gives each thread the channels that the wide one gives it."""

    def found(case: str) -> list[list[str]]:
        chosen = [row for row in rows if row["case"] == case and row["kernel"] == "norm_kernel"]
        return [row["reductions"] for row in chosen]

    wide, _ = found("norms 4096 fp16")  # and a LayerNorm
    narrow = found("ends in 8 bits fp16")[:2]  # those of a product's parts follow
    assert len(wide) == 1
    assert len(narrow) == 2
    assert all(layouts == wide for layouts in narrow)


def test_a_cache_in_8_bits_changes_no_order_of_invariant_sums(rows: list[dict[str, Any]]) -> None:
    check_invariant_sums(rows, least=4, kinds=("int8 cache", "fp8 cache"))


def test_the_early_fetch_changes_no_arithmetic(rows: list[dict[str, Any]]) -> None:
    """Decode attention asks for keys before the wait: the same operations as after it."""
    cases = [f"decode 32x128 fp16{how}" for how in ("", " overlapping", " fetching early")]
    found = [row["arithmetic"] for case in cases for row in rows if row["case"] == case]
    assert len(found) == 3
    assert sum(found[0].values()) > 100
    assert found[0] == found[1] == found[2]


def test_words_of_few_bits_are_copied_ahead_and_unpacked_where_they_are_multiplied(
    rows: list[dict[str, Any]],
) -> None:
    """From 9 rows on: four words a copy, and no way back through shared memory, with zeros too."""
    names = ("8 bits 64 fp16", "4 bits 64 fp16 by 128 with zeros overlapping")
    found = [row for row in rows if row["case"] in names and row["loop"] == "packed"]
    assert len(found) == 8
    for row in found:
        assert row["moves"].get("copies of 8 bytes", 0) >= 4, row
        assert row["moves"]["shared stores"] <= 20, row


def test_words_of_few_rows_go_straight_into_the_product(rows: list[dict[str, Any]]) -> None:
    """Up to 8 rows: no copies, and no exchange between threads but that of a program's last sums."""
    names = (
        "8 bits 8 fp16 overlapping",
        "4 bits 8 fp16 by 128 overlapping",
        "4 bits 8 bf16 by 64 with zeros",
    )
    found = [row for row in rows if row["case"] in names and row["loop"] == "fragments"]
    assert len(found) == 12
    for row in found:
        assert set(row["moves"]) == {"shuffles", "shared stores"}, row
        assert sum(row["moves"].values()) <= 40 * row["outputs"] // 32, row


def test_words_of_many_rows_are_unpacked_where_they_are_multiplied(rows: list[dict[str, Any]]) -> None:
    """The product's left operand comes from registers: nothing unpacked goes through shared memory."""
    found = [row for row in rows if row["case"].startswith("many rows in")]
    assert len(found) == 34
    for row in found:
        assert all(name.startswith("wgmma") for name in row["products"]), row
        assert row["moves"].get("copies of 8 bytes", 0) >= 4, row
        # Of a wide tile of x several warps copy a part each: one shuffle tells a warp its number.
        assert row["moves"]["shuffles"] <= int("wide steps" in row["case"]), row
    assert [
        row for row in found[::2] if row["moves"]["shared stores"]
    ] == []  # the others' ends transpose fp32


def test_numbers_of_8_bits_move_between_no_threads(rows: list[dict[str, Any]]) -> None:
    """But for the sums of all warps and the scales of rows, at the end: no more of that by more columns."""
    found = [row for row in rows if row["case"].startswith("straight, ")]
    assert len(found) == 18
    for row in found:
        assert set(row["products"]) == {"mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"}
        assert row["moves"].get("shuffles", 0) <= 32 + 2, row["case"]


def test_words_go_straight_into_a_warpgroup_s_product(rows: list[dict[str, Any]]) -> None:
    """From memory to the left operand; only the last sums pass through shared memory."""
    found = [row for row in rows if row["case"].startswith("straight in")]
    assert len(found) == 18
    for row in found:
        assert row["kernel"] == "packed_direct_kernel"
        assert all(name.startswith("wgmma") for name in row["products"]), row
        num_rows = int(row["case"].split()[4])
        assert row["moves"]["shared stores"] <= max(num_rows // 4, 8), row
        assert row["moves"]["shuffles"] <= 1, row  # several warps copy a part of x each


def test_gptq_rounds_every_step(rows: list[dict[str, Any]]) -> None:
    """No product joins a sum, and divisions are correctly rounded: numbers are the twin's to the bit."""
    found = [row for row in rows if row["kernel"] == "gptq_block_kernel"]
    assert len(found) == len(GPTQ_CASES)
    for row in found:
        names = set(row["arithmetic"])
        assert names == {"add.rn.f32", "div.rn.f32", "max.f32", "mul.rn.f32", "sub.rn.f32"}, row


def test_prompt_attention_multiplies_by_warp_groups(rows: list[dict[str, Any]]) -> None:
    """Nothing else multiplies or copies."""
    names = ("hopper_attention_kernel", "encoder_attention_kernel")
    found = [row for row in rows if row["kernel"] in names]
    assert len(found) == len(HOPPER_CASES) + len(WINDOW_CASES)
    for row in found:
        assert row["products"], row
        assert all(name.startswith("wgmma") for name in row["products"]), row
        assert not [name for name in row["moves"] if name.startswith("copies")], row


def test_products_of_prompts_run_on_while_words_are_unpacked(rows: list[dict[str, Any]]) -> None:
    check_prompt_products(rows, least=10)
