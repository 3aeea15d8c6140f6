"""Every kernel builds for sm_80 on a machine that has none, and fits it."""

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


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the compiler reports."""
    return compiled_for(80, tmp_path_factory.mktemp("triton"))


def test_every_kernel_compiles_and_fits(rows: list[dict[str, Any]]) -> None:
    check_all_fit(rows, 80)


def test_lanes_agree_on_their_sums(rows: list[dict[str, Any]]) -> None:
    check_lanes_agree(rows)


def test_numbers_of_8_bits_are_multiplied_as_such(rows: list[dict[str, Any]]) -> None:
    check_int8_products(rows, least=18)


def test_a_cache_in_8_bits_changes_no_order_of_invariant_sums(rows: list[dict[str, Any]]) -> None:
    check_invariant_sums(rows, least=4)
