"""A kernel plan names only tiles that kernels have."""

from __future__ import annotations

import pytest
import torch

from ingot.config.plan import TILES, KernelPlan
from ingot.errors import ConfigError
from ingot.kernels import gated_mlp, layer_norm, paged_attention, prefill_attention, rms_norm, rope_kv_write

DEFAULTS = {
    "rms_norm": rms_norm.default_tiles(4096),
    "layer_norm": layer_norm.default_tiles(4096),
    "rope_kv_write": rope_kv_write.default_tiles(),
    "silu_mul": gated_mlp.default_tiles(),
    "paged_attention": paged_attention.default_tiles(8, 4, 128, 2, torch.device("cpu")),
    "prefill_attention": prefill_attention.default_tiles(512, 128, 2),
}


@pytest.mark.parametrize("op", TILES)
def test_the_plan_knows_the_kernels_tiles(op: str) -> None:
    assert set(TILES[op]) == set(DEFAULTS[op])
    KernelPlan(tiles={op: dict(DEFAULTS[op])})


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"rms": {"num_warps": 4}}, "unknown kernels"),
        ({"rms_norm": {"FOO": 4}}, "no such tiles"),
        ({"rms_norm": {"num_warps": 3}}, "out of range"),
        ({"rms_norm": {"num_warps": True}}, "out of range"),
        ({"rms_norm": {"num_warps": 0}}, "out of range"),
    ],
)
def test_odd_plans_are_refused(tiles: dict[str, dict[str, int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KernelPlan(tiles=tiles)


def test_a_plan_goes_through_json() -> None:
    plan = KernelPlan("NVIDIA H200", {"paged_attention": {"MAX_SPLITS": 33}})
    assert KernelPlan.from_json(plan.to_json()) == plan
