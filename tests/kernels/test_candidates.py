"""What tuning tries: the op's default first, nothing twice, only names that the op and the plan know."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.config.kernel_plan import OPS
from ingot.kernels.activation import gated_mlp
from ingot.kernels.cache import rope_kv_write
from ingot.kernels.kernel_checks import merge_tiles
from ingot.kernels.norm import layer_norm, rms_norm
from ingot.kernels.tiles import prefill_tiles

CPU = torch.device("cpu")
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rms_norm": (rms_norm, (4096,)),
    "layer_norm": (layer_norm, (768,)),
    "silu_mul": (gated_mlp, ()),
    "rope_kv_write": (rope_kv_write, ()),
    "prefill_attention": (prefill_tiles, (2048, 128, 2)),
    "prefill_attention short": (prefill_tiles, (16, 64, 2)),
    "prefill_attention wide": (prefill_tiles, (512, 256, 2)),
    "prefill_attention fp32": (prefill_tiles, (512, 64, 4)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", [None, CPU])
def test_candidates(name: str, device: torch.device | None) -> None:
    op, arguments = CASES[name]
    default = op.default_tiles(*arguments)
    candidates = op.candidate_tiles(*arguments, device)
    assert candidates[0] == default
    assert len(candidates) <= 6
    assert len({tuple(sorted(tiles.items())) for tiles in candidates}) == len(candidates)
    for tiles in candidates:
        assert merge_tiles(default, tiles) == tiles
        assert set(tiles) == set(OPS[name.split()[0]].tiles)
        assert tiles["OVERLAP"] == 1, "no GPU, no overlap"


def test_a_gpu_that_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "overlaps", lambda device: True)
    assert rms_norm.candidate_tiles(4096, CPU)[0]["OVERLAP"] == 2
    for op in (gated_mlp, rope_kv_write):
        monkeypatch.setattr(op, "other_overlap", lambda device: [{"OVERLAP": 2}])
        assert [tiles["OVERLAP"] for tiles in op.candidate_tiles(CPU)] == [1, 1, 1, 2]
