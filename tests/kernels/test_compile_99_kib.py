"""Every kernel builds for sm_86 (RTX 30, A10, A40) and sm_89 (RTX 40, L4, L40S), and fits their
99 KiB of shared memory. Launchers choose the tiles of a GPU with so much.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.compile_report import (
    LIMIT,
    check_all_fit,
    check_int8_products,
    check_invariant_sums,
    check_lanes_agree,
    compiled_for,
)

pytestmark = [pytest.mark.timeout(LIMIT + 60), pytest.mark.slow]  # hundreds of kernels


@pytest.fixture(scope="module", params=[86, 89])
def capability(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def rows(capability: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the compiler reports."""
    return compiled_for(capability, tmp_path_factory.mktemp("triton"))


def test_every_kernel_compiles_and_fits(rows: list[dict[str, Any]], capability: int) -> None:
    check_all_fit(rows, capability)


def test_lanes_agree_on_their_sums(rows: list[dict[str, Any]]) -> None:
    check_lanes_agree(rows)


def test_numbers_of_8_bits_are_multiplied_as_such(rows: list[dict[str, Any]]) -> None:
    check_int8_products(rows, least=18)


def test_a_cache_in_8_bits_changes_no_order_of_invariant_sums(
    rows: list[dict[str, Any]], capability: int
) -> None:
    kinds = {86: ("int8 cache",), 89: ("int8 cache", "fp8 cache")}  # which the GPU can have
    check_invariant_sums(rows, least=4, kinds=kinds[capability])
