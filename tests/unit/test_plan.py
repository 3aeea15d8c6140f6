"""A kernel plan names only tiles and keys that kernels have; it holds on the machine that measured it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from ingot.config.kernel_plan import OPS, ROWS, KernelPlan, MeasuredTimes, PlanMachine, plan_key, row_bucket
from ingot.errors import ConfigError
from ingot.kernels.activation import gated_mlp
from ingot.kernels.attention import paged_attention
from ingot.kernels.cache import rope_kv_write
from ingot.kernels.norm import layer_norm, rms_norm
from ingot.kernels.tiles import prefill_tiles, product_tiles
from ingot.kernels.weight.stored_weight import stored

SMALL = product_tiles.small_tiles(8, stored(torch.empty(4096, 4096, device="meta")), 2, torch.device("cpu"))
DEFAULTS = {
    "rms_norm": rms_norm.default_tiles(4096),
    "layer_norm": layer_norm.default_tiles(4096),
    "rope_kv_write": rope_kv_write.default_tiles(),
    "silu_mul": gated_mlp.default_tiles(),
    "paged_attention": paged_attention.default_tiles(8, 4, 128, 2, torch.device("cpu")),
    "prefill_attention": prefill_tiles.default_tiles(512, 128, 2),
    "small_linear": SMALL,
    "small_qkv": SMALL,
    "small_gate_up": SMALL,
}
# Where every head has keys of its own.
ALONE = {"paged_attention": paged_attention.default_tiles(32, 1, 128, 2, torch.device("cpu"))}
SHAPE = {"h": 4096, "i": 11008, "q": 32, "kv": 8, "d": 128, "n": 4096, "k": 11008}
HERE = PlanMachine("NVIDIA H200", "9.0", 2, "2.11.0", "3.6.0")
MEASURED_ON = {
    "gpu": "NVIDIA H200",
    "capability": "9.0",
    "value_bytes": 2,
    "torch": "2.11.0",
    "triton": "3.6.0",
}


def shape_of(op: str) -> dict[str, int]:
    return {dim: SHAPE[dim] for dim in OPS[op].dims if dim != ROWS}


def plan_of(tiles: Any, **fields: Any) -> KernelPlan:
    return KernelPlan.from_json({**MEASURED_ON, "tiles": tiles, **fields})


@pytest.mark.parametrize("op", OPS)
def test_the_plan_knows_the_kernels_tiles_and_its_own_keys(op: str) -> None:
    assert set(OPS[op].tiles) == {*DEFAULTS[op], *ALONE.get(op, ())}
    plan = plan_of({op: {plan_key(op, 8, shape_of(op)): dict(DEFAULTS[op])}})
    assert plan.table(op, **shape_of(op)).at(5) == DEFAULTS[op]
    assert plan.num_choices == 1


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"rms": {"m1_h64": {"num_warps": 4}}}, "unknown kernels"),
        ({"rms_norm": {"m1_h64": {"FOO": 4}}}, "no such tiles"),
        ({"rms_norm": {"m1_h64": {"num_warps": 3}}}, "out of range"),
        ({"rms_norm": {"m1_h64": {"num_warps": True}}}, "out of range"),
        ({"rms_norm": {"m1_h64": {"num_warps": 0}}}, "out of range"),
        ({"rms_norm": {"num_warps": {"num_warps": 4}}}, "no such keys.*m<number>_h<number>"),
        ({"rms_norm": {"h64": {"num_warps": 4}}}, "no such keys"),
        ({"rms_norm": {"h64_m1": {"num_warps": 4}}}, "no such keys"),
        ({"rms_norm": {"m1_h064": {"num_warps": 4}}}, "no such keys"),
        ({"rms_norm": {"m1_h64_": {"num_warps": 4}}}, "no such keys"),
        ({"rms_norm": {"m3_h64": {"num_warps": 4}}}, "no such keys"),  # 3 rows are in the bucket of 8
        ({"paged_attention": {"q32_kv8_d128": {"BLOCK_N": 4}}}, "no such keys"),
    ],
)
def test_odd_plans_are_refused(tiles: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(tiles)


def test_tiles_without_their_machine_are_refused() -> None:
    for missing in MEASURED_ON:
        with pytest.raises(ConfigError, match="where it was measured"):
            plan_of({"rms_norm": {"m1_h64": {"num_warps": 4}}}, **{missing: None})


@pytest.mark.parametrize("us", [0, -1.0, float("nan"), float("inf"), True, "3"])
def test_times_are_times(us: Any) -> None:
    with pytest.raises(ConfigError, match="best_us"):
        MeasuredTimes(1.0, us)


def test_a_plan_goes_through_json() -> None:
    tiles = {"paged_attention": {"m1_q32_kv8_d128": {"MAX_SPLITS": 33}}}
    measured = {"paged_attention": {"m1_q32_kv8_d128": {"default_us": 3.5, "best_us": 3.0}}}
    plan = plan_of(tiles, measured=measured)
    assert plan.measured["paged_attention"]["m1_q32_kv8_d128"] == MeasuredTimes(3.5, 3.0)
    assert KernelPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_empty_plan_of_earlier_engines_loads() -> None:
    assert KernelPlan.from_json({"gpu": None, "tiles": {}}) == KernelPlan()


def test_rows_fall_into_buckets() -> None:
    buckets = {rows: row_bucket(rows) for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 2048, 2049)}
    assert list(buckets.values()) == [1, 8, 8, 16, 16, 32, 32, 64, 64, 128, 2048, 4096]
    assert row_bucket(0) == 1


def test_a_lookup_finds_bucket_and_shape() -> None:
    one, eight, other = {"BLOCK_N": 2}, {"BLOCK_N": 4}, {"BLOCK_N": 8}
    tiles = {"m1_n64_k128": one, "m8_n64_k128": eight, "m8_n64_k256": other}
    table = plan_of({"small_linear": tiles}).table("small_linear", n=64, k=128)
    assert [table.at(rows) for rows in (1, 2, 8, 9)] == [one, eight, eight, None]
    assert plan_of({"small_linear": tiles}).table("small_linear", n=64, k=64).at(1) is None
    assert plan_of({"small_linear": tiles}).table("small_qkv", n=64, k=128).at(1) is None


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({}, None),
        ({"torch": "2.12.0"}, None),
        ({"triton": "3.6.1"}, None),
        ({"triton": "3.7.0"}, "Triton 3.6, not 3.7"),
        ({"gpu": "NVIDIA A100"}, "GPU NVIDIA H200"),
        ({"capability": "8.0"}, r"not NVIDIA H200 \(8.0\)"),
        ({"value_bytes": 4}, "bytes per value 2, not 4"),
    ],
)
def test_choices_hold_where_they_were_measured(change: dict[str, Any], reported: str | None) -> None:
    plan = plan_of({"rms_norm": {"m1_h64": {"num_warps": 4}}})
    why = plan.why_unfit(replace(HERE, **change))
    assert why is None if reported is None else why is not None
    if reported is not None and why is not None:
        assert re.search(reported, why)


def test_a_plan_without_choices_fits_everywhere() -> None:
    assert KernelPlan().why_unfit(HERE) is None
    assert KernelPlan.from_json({**MEASURED_ON, "gpu": "Other"}).why_unfit(HERE) is None
