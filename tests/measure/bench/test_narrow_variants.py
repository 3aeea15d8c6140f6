"""The benchmark of steps in fewer bits times the same step in every way, and keeps what it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.narrow_variants import ALL, OPS, NarrowStack
from tests.measure.bench.dry_run import dry_run


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "own", [frozenset(), *(ALL - {op} for op in OPS)], ids=lambda own: "+".join(sorted(own)) or "none"
)
def test_every_way_gives_the_same(bits: int, own: frozenset[str]) -> None:
    stack = NarrowStack(bits, 9, 2, dry=True)
    wanted = stack.step({}, ALL)
    assert wanted.float().std() > 0.1
    torch.testing.assert_close(stack.step({}, own), wanted, rtol=2e-2, atol=2e-2)


def test_few_rows_are_the_small_kernels() -> None:
    for rows, kinds in ((8, {True}), (9, {True, False})):
        stack = NarrowStack(4, rows, 1, dry=True)
        assert all({small for small, _ in stack.choices(op)} == kinds for op in OPS)


def test_a_dry_run_writes_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = dry_run("narrow_variants.py", "4x9,8x2", tmp_path / "found.json", monkeypatch)
    assert set(first["ways"]) >= {"small", *(f"packed {op}" for op in OPS), "packed gate_up+qkv+down+o"}
    assert set(second["ways"]) == {"small"}
    for case in (first, second):
        assert set(case["tried"]) == set(OPS)
        assert all(case["tried"].values())
