"""The benchmark of w8a8's steps times the same step with any tiles, and keeps what it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.int8_variants import OPS, Int8Stack, candidates
from tests.measure.bench.dry_run import dry_run


@pytest.mark.stays("gate_up-8-20", "qkv-8-3", "down-8-3")
@pytest.mark.stays("gate_up-8-20", "qkv-8-3", "down-8-3", "o-4-3")
@pytest.mark.parametrize(("bits", "rows"), [(8, 3), (8, 20), (4, 3)])
@pytest.mark.parametrize("op", OPS)
def test_all_tiles_give_the_same(bits: int, rows: int, op: str) -> None:
    """To the bit, but for the output product, whose heads' sums are fp32 in another order."""
    stack = Int8Stack(bits, rows, 1, dry=True)
    wanted = stack.step({})
    assert wanted.float().std() > 0.1
    choices = candidates(bits, op, rows)
    assert len(choices) >= 4
    for choice in choices[:: 4 if bits == 8 else 9]:  # interpreted, those of 4 bits take longest
        found = stack.step({op: choice})
        if op == "o":
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(found, wanted), choice


@pytest.mark.slow
def test_a_dry_run_writes_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = dry_run("int8_variants.py", "8x4,8x20", tmp_path / "found.json", monkeypatch)
    assert (first["rows"], second["rows"]) == (4, 20)
    assert all(first["tried"][op] for op in OPS)
    assert all(second["tried"][op] for op in OPS)
