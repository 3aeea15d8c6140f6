"""GPTQ's parts: sums and inverses by panels, runs of a moving grid, and the whole by the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ingot.errors import BuildError
from ingot.kernels.weight.gptq_block import gptq_block, gptq_block_reference
from ingot.quant.methods import gptq as module
from ingot.quant.methods.gptq import Compensated, HessianSum, gptq
from ingot.quant.methods.rounding import best_grid, dequantize, in_groups
from tests.kernels.numerics import launched
from tests.quant.inputs import gptq_error, inputs, weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[32, 100, 2048])
def panel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Panels of a part of the columns, of all of them but few, and of more than there are."""
    width = request.param
    panels = module._panels
    monkeypatch.setattr(module, "_panels", lambda columns, given=width: panels(columns, given))
    return width


def test_the_sum_by_panels(panel: int) -> None:
    """Whole and symmetric to the bit, and more can be added after it was read."""
    x, seen = inputs(500, 130).double(), HessianSum(130, dtype=torch.float64)
    seen.add(x[:200])
    torch.testing.assert_close(seen.total, x[:200].T @ x[:200])
    seen.add(x[200:])
    torch.testing.assert_close(seen.total, x.T @ x)
    torch.testing.assert_close(seen.mean(), x.T @ x / 500)
    assert torch.equal(seen.total, seen.total.T)


def test_an_infinite_sum_is_seen_in_every_panel(panel: int) -> None:
    for column in (0, 64, 129):
        x, seen = inputs(10, 130), HessianSum(130)
        x[3, column] = torch.inf
        seen.add(x)
        with pytest.raises(BuildError, match="not finite"):
            seen.mean()


def test_the_factor_by_panels(panel: int) -> None:
    """Upper, and its product the inverse of the damped Hessian in the order given."""
    x = inputs(900, 130).double()
    hessian, order = x.T @ x / 900, torch.randperm(130, generator=torch.Generator().manual_seed(3))
    factor, damping = module._factor(hessian, order, 0.01)
    assert factor.dtype == torch.float32
    assert damping == 0.01
    assert torch.equal(factor, factor.triu())
    damped = hessian[order][:, order] + 0.01 * hessian.diagonal().mean() * torch.eye(130)
    whole = factor.double().T @ factor.double() @ damped
    torch.testing.assert_close(whole, torch.eye(130, dtype=torch.float64), rtol=0, atol=1e-4)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("columns", "group"), [(200, 32), (200, 48), (300, 96), (420, 192), (300, 128)])
def test_a_group_s_grid_is_of_its_weights_when_its_turn_comes(
    columns: int, group: int, act_order: bool
) -> None:
    """Each group's scales against those of a walk in float64, column by column, that takes its numbers."""
    weight, seen = weights(24, columns), HessianSum(columns, dtype=torch.float64)
    seen.add(inputs(1000, columns))
    found = gptq(weight, seen.mean(), 4, group, act_order=act_order, scale_dtype=torch.float32)
    order = torch.arange(columns) if found.order is None else found.order
    factor = module._factor(seen.mean(), order, 0.01)[0].double()
    left = weight[:, order].double()
    for start in range(0, columns, group):
        block = left[:, start : start + group]
        grid = best_grid(in_groups(block, group)[:, :1], 4, True, torch.float64)
        scales = found.quantized.scales[start // group]
        torch.testing.assert_close(scales.double(), grid.scales[:, 0], rtol=1e-4, atol=1e-6)
        for place in range(start, min(start + group, columns)):
            near = (found.quantized.values[:, place].double() - 8) * scales.double()
            error = (left[:, place] - near) / factor[place, place]
            left[:, place + 1 :] -= torch.outer(error, factor[place, place + 1 :])


def by_both(monkeypatch: pytest.MonkeyPatch, choose: Callable[[], Compensated]) -> list[int]:
    """The columns of every block, once kernel and reference have chosen the same values and scales."""
    found, blocks = [], []

    def counted(walk: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(weight: torch.Tensor, *rest: Any) -> torch.Tensor:
            blocks[-1].append(len(weight))
            return walk(weight, *rest)

        return run

    for walk in (gptq_block_reference, launched(gptq_block)):
        blocks.append([])
        monkeypatch.setattr(module, "gptq_block", counted(walk))
        found.append(choose())
    for name in ("values", "scales"):
        assert torch.equal(getattr(found[0].quantized, name), getattr(found[1].quantized, name))
    assert torch.equal(dequantize(found[0].quantized), dequantize(found[1].quantized))
    assert blocks[0] == blocks[1]
    return blocks[0]


@pytest.mark.stays("4-96-False", "4-32-True", "8-0-False")
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 96), (4, 32), (4, 0), (8, 0)])
def test_by_the_kernel(bits: int, group: int, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, seen = weights(40, 200).to(DEVICE), HessianSum(200, DEVICE)
    seen.add(inputs(700, 200).to(DEVICE))
    hessian, options = seen.mean(), {"act_order": True, "static_groups": static}
    blocks = by_both(monkeypatch, lambda: gptq(weight, hessian, bits, group, **options))
    assert blocks == ([128, 72] if static or not group else [group] * (200 // group) + [200 % group])


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "columns"), [(4096, 11008), (22016, 4096)])
def test_7b_shapes_by_the_kernel(outputs: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, seen = weights(outputs, columns).cuda(), HessianSum(columns, "cuda")
    seen.add(inputs(2000, columns).cuda())
    hessian, options = seen.mean(), {"act_order": True, "static_groups": True}
    blocks = by_both(monkeypatch, lambda: gptq(weight, hessian, 4, 128, **options))
    assert blocks == [128] * (columns // 128)


@pytest.mark.gpu
def test_a_gpu_chooses_as_a_cpu_does() -> None:
    """Sums of the corrections differ in their last bits, so that few numbers do, and the outputs do not."""
    weight, seen = weights(256, 2000), HessianSum(2000)
    seen.add(inputs(3000, 2000))
    hessian, options = seen.mean(), {"act_order": True, "static_groups": True}
    ours = gptq(weight.cuda(), hessian.cuda(), 4, 128, **options)
    theirs = gptq(weight, hessian, 4, 128, **options)
    assert float((ours.quantized.values.cpu() == theirs.quantized.values).float().mean()) > 0.99
    errors = [
        gptq_error(found, weight.to(h.device), h) for found, h in ((ours, hessian.cuda()), (theirs, hessian))
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
