"""A launch or two of every kernel build for sm_90 on a machine that has none, fit it, and wait where early.

Owns the choice. ``make test-all`` builds all: test_compile_sm_90.py, test_compile_sm_80.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.kernels.compile_report import (
    LIMIT,
    check_all_fit,
    check_int8_products,
    check_lanes_agree,
    check_prompt_products,
    compiled_for,
)

pytestmark = pytest.mark.timeout(LIMIT + 60)
CASES = (
    "token feed",
    "step upload",
    "norms 4096 fp16 overlapping",
    "silu_mul 11008 fp16 overlapping",
    "int8 cache 32x128 fp16 of 64 fetching early",
    "decode 32/8x128 fp16 alone fetching early",
    "sampling 1 of 151936 fp16 overlapping",
    "penalties 32 of 151936 bf16",
    "masks 32 of 151936",
    "transcripts 64 of 51866 fp16",
    "log-probabilities 32 of 151936 bf16",
    "small_linear 1 fp16 overlapping",
    "small_gate_up 1 bf16",
    "small_gate_up 8 fp16 overlapping",
    "small_qkv 1 bf16 overlapping",
    "small_qkv 64 fp16 overlapping",
    "split sums 8 fp16 overlapping",
    "invariant_linear 1 fp16",
    "invariant attention 32x128 fp16",
    "dequantize 8 bits fp16",
    "host rows 4096 fp16",
    "8 bits 8 fp16 overlapping",
    "4 bits 1 bf16 by 128 with zeros overlapping",
    "straight in 8 bits 16 bf16",
    "streamed in 4 bits",
    "many rows in 8 bits 128 fp16",
    "prompts in 8 bits fp16 by 128 with zeros",
    "prompts in 4 bits bf16 by 32 with zeros, gates",
    "gptq 128 of 22016 uint8",
    "expanded 4096 by 128",
    "both in 8 bits 2048 sums",
    "both in 8 bits 32 by groups of warps",
    "straight, 4 bits inside 8 8 fp16 overlapping",
    "ends in 8 bits bf16 overlapping",
    "blocks 8 fp16 overlapping",
    "post-norm 3584 bf16 overlapping",
    "softcap 8 of 256000 bf16",
    "hopper 12x64 bf16 large blocks",
    "gate and up of prompts bf16",
    "windows 8x20x64 fp16",
)


@pytest.fixture(scope="module")
def cache() -> Path:
    """Of Triton, whose key has the compiler's and the kernel's source: a second run compiles what changed."""
    return ROOT / ".pytest_cache" / "triton"


@pytest.fixture(scope="module")
def both(cache: Path) -> list[dict[str, Any]]:
    """What the compiler reports, for sm_86 of one case: one process imports it once."""
    return compiled_for(90, cache, CASES, 86, "decode 32/8x64 fp32 of 64")


@pytest.fixture(scope="module")
def rows(both: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those for sm_90."""
    return [row for row in both if row["sm"] == 90]


def test_every_kernel_compiles_and_fits(rows: list[dict[str, Any]]) -> None:
    check_all_fit(rows, 90)
    assert [row for row in rows if row.get("spill_bytes", 0) > 16] == []


def test_lanes_agree_on_their_sums(both: list[dict[str, Any]]) -> None:
    """Also in the merge of grouped heads, where sm_86 is what shows a product that is not rounded."""
    assert ("paged_stream_kernel", 86) in {(row["kernel"], row["sm"]) for row in both}
    check_lanes_agree(both)


def test_what_starts_early_waits_for_its_input(rows: list[dict[str, Any]]) -> None:
    early = [row for row in rows if row["overlap"] > 1]
    assert len({(row["kernel"], row["loop"]) for row in early}) >= 20
    assert [row for row in early if not row["waits"]] == []


def test_numbers_of_8_bits_are_multiplied_as_such(rows: list[dict[str, Any]]) -> None:
    check_int8_products(rows, least=1)


def test_products_of_prompts_run_on_while_words_are_unpacked(rows: list[dict[str, Any]]) -> None:
    check_prompt_products(rows, least=2)
