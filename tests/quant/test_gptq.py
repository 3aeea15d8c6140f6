"""GPTQ against AutoGPTQ's and RPTQ4LLM's numbers, and against rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.errors import BuildError, ConfigError
from ingot.quant.methods.gptq import GridRule, HessianSum, gptq
from ingot.quant.methods.rounding import Grid, dequantize, quantize
from tests.quant.inputs import gptq_error, inputs, output_error, weights

DEAD = 40  # the golden input column that is always 0
AUTOGPTQ = [
    ("perchannel_sym", 0, True, False),
    ("group128_sym", 128, True, False),
    ("group128_asym", 128, False, False),
    ("group128_sym_actorder", 128, True, True),
]


@pytest.fixture(scope="module")
def reference(golden: Path) -> dict[str, torch.Tensor]:
    with np.load(golden / "quant" / "gptq.npz", allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


@pytest.fixture(scope="module")
def reported(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "quant" / "gptq.json").read_text())["results"]


def hessian_of(reference: dict[str, torch.Tensor]) -> HessianSum:
    found = HessianSum(256, dtype=torch.float64)
    for batch in reference["inputs_fp16"]:
        found.add(batch)
    return found


def autogptq_rule(symmetric: bool) -> GridRule:
    """AutoGPTQ's grid: 15 steps over the range, about 8 where it is symmetric."""

    def rule(blocks: torch.Tensor) -> Grid:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales = (high - low) / 15
        zeros = torch.full_like(scales, 8.0) if symmetric else (-low / scales).round()
        return Grid(scales, zeros, 0, 15)

    return rule


def test_the_sum_is_the_reference_s(reference: dict[str, torch.Tensor]) -> None:
    seen = hessian_of(reference)
    assert seen.count == 320
    torch.testing.assert_close(
        seen.total.diagonal() * 2 / 4, reference["hessian_diag"].double(), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(seen.mean() * 320, seen.total)


@pytest.mark.parametrize(("name", "group", "symmetric", "act_order"), AUTOGPTQ)
def test_autogptq(
    reference: dict[str, torch.Tensor],
    reported: dict[str, Any],
    name: str,
    group: int,
    symmetric: bool,
    act_order: bool,
) -> None:
    """The same integers and scales; AutoGPTQ sets dead columns to 0 before groups get their scales."""
    weight = reference["weight"].clone()
    if group:
        weight[:, DEAD] = 0
    hessian = hessian_of(reference).mean()
    found = gptq(
        weight,
        hessian,
        4,
        group,
        symmetric=symmetric,
        act_order=act_order,
        scale_dtype=torch.float32,
        rule=autogptq_rule(symmetric),
    )
    expected = {part: reference[f"autogptq_b4_{name}_{part}"] for part in ("q_int", "scale", "zero", "g_idx")}
    numbers, near = found.quantized.values, dequantize(found.quantized)
    if found.order is not None:
        back = torch.argsort(found.order)
        numbers, near = numbers[:, back], near[:, back]
        assert torch.equal(back // group, expected["g_idx"].long())
    assert (found.order is not None) == act_order
    live = torch.arange(256) != DEAD
    assert float((numbers == expected["q_int"])[:, live].float().mean()) > 0.999
    scales = found.quantized.scales.T if group else found.quantized.scales[:, None]
    torch.testing.assert_close(scales, expected["scale"], rtol=1e-5, atol=1e-7)
    if found.quantized.zeros is not None:
        assert torch.equal(found.quantized.zeros.T.float(), expected["zero"])
    x = reference["inputs_fp16"].double().flatten(0, 1)
    error = float(((weight - near).double() @ x.T).square().sum())
    assert error == pytest.approx(reported[f"autogptq_b4_{name}"]["output_error"], rel=1e-2)
    assert error == pytest.approx(gptq_error(found, weight, hessian) * 320, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "group"), [("perchannel_asym", 0), ("group128_asym", 128), ("perchannel_sym", 0)]
)
def test_rptq4llm(
    reference: dict[str, torch.Tensor], reported: dict[str, Any], name: str, group: int
) -> None:
    """Numbers for scales that are given: RPTQ4LLM's own are of 16 steps, from the weight as it is."""
    weight = reference["weight"].clone()
    weight[:, DEAD] = 0
    scales = reference[f"rptq_b4_{name}_scale"]
    zeros = reference.get(f"rptq_b4_{name}_zero", torch.zeros_like(scales)) + 8
    grid = Grid(scales, zeros, 0, 15)
    hessian = hessian_of(reference).mean()
    found = gptq(weight, hessian, 4, group, symmetric=False, scale_dtype=torch.float32, grid=grid)
    near = dequantize(found.quantized)
    same = (near - reference[f"rptq_b4_{name}_q_weight"]).abs() < 1e-5
    assert float(same.float().mean()) > 0.998
    error = gptq_error(found, weight, hessian) * 320
    assert error == pytest.approx(reported[f"rptq_b4_{name}"]["output_error"], rel=1e-2)


VARIANTS: list[dict[str, bool]] = [
    {},
    {"act_order": True, "static_groups": True},
    {"act_order": True},
    {"static_groups": True, "clip": True},
    {"symmetric": False},
]


@pytest.mark.grid(1)
@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize(("bits", "group"), [(4, 0), (4, 32), (4, 48), (4, 128), (8, 0)])
def test_beats_rounding_on_correlated_inputs(options: dict[str, bool], bits: int, group: int) -> None:
    """Measured on inputs that were not calibrated with; columns are no multiple of the group."""
    weight, seen = weights(48, 200), HessianSum(200)
    x = inputs(3000, 200)
    for batch in x[:2000].split(700):
        seen.add(batch)
    symmetric = options.get("symmetric", True)
    found = gptq(weight, seen.mean(), bits, group, **options)
    near = dequantize(found.quantized)
    if found.order is not None:
        near = near[:, torch.argsort(found.order)]
    rounded = dequantize(quantize(weight, bits, group, symmetric=symmetric))
    unseen = x[2000:]
    ours = float(((weight - near) @ unseen.T).square().sum())
    theirs = float(((weight - rounded) @ unseen.T).square().sum())
    assert ours < 0.6 * theirs
    expected = float(((weight - near) @ x[:2000].T).square().sum()) / 2000
    assert gptq_error(found, weight, seen.mean()) == pytest.approx(expected, rel=1e-3)
    assert found.quantized.zeros is None or not symmetric


def test_clipping_by_importance_helps_whole_rows() -> None:
    weight, seen = weights(48, 200), HessianSum(200)
    weight[:, 9] *= 8
    x = inputs(2000, 200, loud=0)
    x[:, 9] *= 0.01
    seen.add(x)
    hessian = seen.mean()
    plain, narrow = (
        gptq_error(gptq(weight, hessian, 4, act_order=True, clip=clip), weight, hessian)
        for clip in (False, True)
    )
    assert narrow < 0.8 * plain


def test_the_same_numbers_again() -> None:
    seen = HessianSum(96)
    seen.add(inputs(400, 96))
    first, second = (gptq(weights(16, 96), seen.mean(), 4, 32, act_order=True) for _ in range(2))
    assert torch.equal(first.quantized.values, second.quantized.values)
    assert first.order is not None
    assert torch.equal(first.order, second.order)


def test_inputs_that_are_not_correlated_leave_rounding() -> None:
    found = gptq(weights(8, 64), torch.eye(64), 4, 32, damping=0.0)
    assert torch.equal(found.quantized.values, quantize(weights(8, 64), 4, 32).values)


def test_a_dead_column_is_rounded_as_it_is() -> None:
    x = inputs(300, 64)
    x[:, 5] = 0
    seen = HessianSum(64)
    seen.add(x)
    for options in ({}, {"act_order": True}):
        found = gptq(weights(8, 64), seen.mean(), 4, **options)
        assert torch.equal(found.quantized.values[:, 5], quantize(weights(8, 64), 4).values[:, 5])


def test_fewer_tokens_than_columns_are_damped() -> None:
    seen = HessianSum(128)
    seen.add(inputs(8, 128))
    found = gptq(weights(8, 128), seen.mean(), 4, 32, damping=0.0)
    assert found.damping > 0
    rounded = dequantize(quantize(weights(8, 128), 4, 32))
    ours = gptq_error(found, weights(8, 128), seen.mean())
    assert ours < output_error(weights(8, 128) - rounded, seen.mean())


def test_each_try_damps_anew() -> None:
    """A Hessian that takes two tries gives what the last try's damping gives alone."""
    seen = HessianSum(64, dtype=torch.float64)
    seen.add(inputs(32, 64))
    hessian = seen.mean()
    hessian -= 0.05 * hessian.diagonal().mean() * torch.eye(64)
    hessian.diagonal().clamp_(min=0.05)
    weight = weights(32, 64)
    again = gptq(weight, hessian, 8, damping=0.01)
    once = gptq(weight, hessian, 8, damping=0.1)
    assert again.damping == once.damping == 0.1
    assert torch.equal(again.quantized.values, once.quantized.values)


@pytest.mark.parametrize("act_order", [False, True])
def test_columns_one_by_one(act_order: bool) -> None:
    """The paper's loop without blocks, in fp64: beyond a block's end errors are made good alike."""
    weight, seen = weights(8, 300), HessianSum(300, dtype=torch.float64)
    seen.add(inputs(1200, 300))
    hessian = seen.mean()
    found = gptq(weight, hessian, 8, act_order=act_order)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(300)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(300)
    factor = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    left, scale = weight[:, order].double(), quantize(weight, 8).scales.double()
    for column in range(300):
        near = (left[:, column] / scale).round().clamp(-127, 127) * scale
        error = (left[:, column] - near) / factor[column, column]
        left[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
        left[:, column] = near
    numbers = (left / scale[:, None]).round()
    assert float((found.quantized.values[:, order] == numbers).double().mean()) > 0.999


def test_refusals() -> None:
    weight = weights(4, 16)
    with pytest.raises(BuildError, match="no token"):
        HessianSum(16).mean()
    broken = HessianSum(16)
    broken.add(torch.full((1, 16), torch.inf))
    with pytest.raises(BuildError, match="not finite"):
        broken.mean()
    with pytest.raises(BuildError, match="not finite"):
        gptq(weight, torch.full((16, 16), torch.nan), 4)
    with pytest.raises(ConfigError, match="has the wrong shape"):
        gptq(weight, torch.eye(8), 4)
    with pytest.raises(BuildError, match="all 0"):
        gptq(weight, torch.zeros(16, 16), 4)
    with pytest.raises(BuildError, match="factorized"):
        gptq(weight, -torch.ones(16, 16) + 2 * torch.eye(16), 4)
    weight[2, 3] = torch.nan
    with pytest.raises(BuildError, match="row 2"):
        gptq(weight, torch.eye(16), 4)
