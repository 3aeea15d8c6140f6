"""Every kernel builds for sm_80 and sm_90 on a machine that has neither, and fits what such a GPU has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1500)  # hundreds of kernels

SHARED_LIMIT = {80: 166_912, 90: 232_448}  # bytes a program may use
KERNELS = {
    "keep_tokens_kernel",
    "best_token_kernel",
    "bin_scores_kernel",
    "find_cut_kernel",
    "fragment_gate_up_kernel",
    "fragment_linear_kernel",
    "fragment_qkv_kernel",
    "dequantize_kernel",
    "expand_int8_kernel",
    "int8_matmul_kernel",
    "invariant_attention_kernel",
    "invariant_linear_kernel",
    "invariant_meet_kernel",
    "layer_norm_kernel",
    "take_tokens_kernel",
    "list_scores_kernel",
    "packed_matmul_kernel",
    "paged_attention_merge_kernel",
    "paged_attention_single_kernel",
    "paged_stream_kernel",
    "pick_token_kernel",
    "prefill_attention_kernel",
    "rms_norm_blocks_kernel",
    "rms_norm_kernel",
    "rope_kv_write_kernel",
    "silu_mul_blocks_kernel",
    "silu_mul_int8_kernel",
    "silu_mul_kernel",
    "small_gate_up_kernel",
    "small_gate_up_matrix_kernel",
    "small_linear_kernel",
    "small_linear_matrix_kernel",
    "small_qkv_kernel",
    "tile_tops_kernel",
    "tile_weights_kernel",
    "small_qkv_matrix_kernel",
    "sum_norm_kernel",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the compiler reports, from a process of its own: this one may run Triton's interpreter."""
    root = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", "80", "90"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_compiles_for_both(rows: list[dict[str, Any]]) -> None:
    for capability in SHARED_LIMIT:
        assert {row["kernel"] for row in rows if row["sm"] == capability} == KERNELS


def test_shared_memory_fits(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["shared"] > SHARED_LIMIT[row["sm"]]] == []


def test_registers_do_not_spill_on_sm_90(rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if "spill_bytes" in row]
    if not measured:
        pytest.skip("this Triton comes without cuobjdump")
    assert [row for row in measured if row["sm"] == 90 and row["spill_bytes"] > 16] == []


def test_what_starts_early_waits_for_its_input(rows: list[dict[str, Any]]) -> None:
    early = [row for row in rows if row["sm"] == 90 and row["overlap"] > 1]
    assert len(early) >= 40
    assert [row for row in early if not row["waits"]] == []


def test_numbers_of_8_bits_are_multiplied_as_such(rows: list[dict[str, Any]]) -> None:
    """By the tensor cores, into int32, and by nothing else."""
    found = [row for row in rows if row["case"].startswith("both in 8 bits")]
    assert len(found) >= 20
    for row in found:
        names = list(row["products"])
        assert names, row
        assert all(".s32.s8.s8" in name for name in names), row
    wide = [name for row in found if row["sm"] == 90 for name in row["products"] if name.startswith("wgmma")]
    assert wide


def test_ending_in_8_bits_changes_no_order_of_sums(rows: list[dict[str, Any]]) -> None:
    """A norm that ends in 8 bits gives each thread the channels that the wide one gives it."""

    def found(case: str) -> list[list[str]]:
        chosen = [row for row in rows if row["case"] == case and row["kernel"] == "rms_norm_kernel"]
        return [row["reductions"] for row in chosen if row["sm"] == 90]

    (wide,) = found("norms 4096 fp16")
    narrow = found("ends in 8 bits fp16")
    assert len(wide) == 1
    assert len(narrow) >= 2
    assert all(layouts == wide for layouts in narrow)


def test_a_cache_in_8_bits_changes_no_order_of_invariant_sums(rows: list[dict[str, Any]]) -> None:
    """Decodes and prompts take different instructions: of 16 bits both must sum neighbouring columns."""
    found = [row for row in rows if row["kernel"] == "invariant_attention_kernel"]
    halves = [row for row in found if "fp32" not in row["case"]]
    for kind in ("int8 cache", "fp8 cache"):
        assert len([row for row in halves if row["case"].startswith(kind)]) >= 4
    assert [row for row in halves if row["operand_runs"] != [2]] == []


def test_the_early_fetch_changes_no_arithmetic(rows: list[dict[str, Any]]) -> None:
    """Decode attention asks for keys before the wait: the same operations as after it."""
    cases = [f"decode 32x128 fp16{how}" for how in ("", " overlapping", " fetching early")]
    found = [row["arithmetic"] for case in cases for row in rows if row["case"] == case and row["sm"] == 90]
    assert len(found) == 3
    assert sum(found[0].values()) > 100
    assert found[0] == found[1] == found[2]


def test_words_of_few_bits_are_copied_ahead_and_unpacked_where_they_are_multiplied(
    rows: list[dict[str, Any]],
) -> None:
    """From 9 rows on: four words a copy, and no way back through shared memory, with zeros too."""
    names = ("8 bits 64 fp16", "4 bits 64 fp16 by 128 with zeros overlapping")
    found = [row for row in rows if row["case"] in names and row["sm"] == 90 and "matrix" in row["kernel"]]
    assert len(found) == 8
    for row in found:
        assert row["moves"].get("copies of 8 bytes", 0) >= 4, row
        assert row["moves"]["shared stores"] <= 20, row


def test_words_of_few_rows_go_straight_into_the_product(rows: list[dict[str, Any]]) -> None:
    """Up to 8 rows: no copies, and no exchange between threads but that of the last sums."""
    names = (
        "8 bits 8 fp16 overlapping",
        "4 bits 8 fp16 by 128 overlapping",
        "4 bits 8 bf16 by 64 with zeros",
    )
    found = [row for row in rows if row["case"] in names and row["sm"] == 90 and "fragment" in row["kernel"]]
    assert len(found) == 12
    for row in found:
        assert set(row["moves"]) == {"shuffles", "shared stores"}, row
        assert sum(row["moves"].values()) <= 40, row


def test_words_of_many_rows_are_unpacked_where_they_are_multiplied(rows: list[dict[str, Any]]) -> None:
    """The product's left operand comes from registers: nothing unpacked goes through shared memory."""
    found = [row for row in rows if row["case"].startswith("many rows in") and row["sm"] == 90]
    assert len(found) == 20
    for row in found:
        assert all(name.startswith("wgmma") for name in row["products"]), row
        assert row["moves"].get("copies of 8 bytes", 0) >= 4, row
        assert row["moves"]["shuffles"] == 0, row
    assert [
        row for row in found[::2] if row["moves"]["shared stores"]
    ] == []  # the others' ends transpose fp32
