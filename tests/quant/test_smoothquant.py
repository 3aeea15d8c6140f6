"""SmoothQuant against its authors' scales and fake quantization, and against no smoothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.errors import ConfigError
from ingot.quant.methods.channel_folding import fold_into_columns, fold_into_norm, value_rows
from ingot.quant.methods.smoothquant import (
    fake_per_channel,
    fake_per_tensor,
    fake_per_token,
    search_smoothing,
    smoothing_scales,
)
from tests.quant.inputs import inputs, weights

DEAD = 3  # the golden channel without activation
TOLERANCE = {"rtol": 1e-6, "atol": 1e-7}


def arrays(golden: Path, name: str) -> dict[str, torch.Tensor]:
    with np.load(golden / "quant" / f"{name}.npz", allow_pickle=False) as file:
        return {part: torch.from_numpy(file[part]) for part in file.files}


@pytest.mark.parametrize("alpha", [0.5, 0.8])
@pytest.mark.parametrize("norm", ["rms", "ln"])
def test_scales_and_folding_are_the_reference_s(golden: Path, alpha: float, norm: str) -> None:
    given = arrays(golden, "smoothquant_scales")
    own = [given[f"weight{i}"] for i in range(3)]
    found = smoothing_scales(given["act_max"], own, alpha, keep_dead=False)
    reported = f"{norm}_a{alpha}_"
    torch.testing.assert_close(found, given[reported + "scales"], **TOLERANCE)
    weight, bias = fold_into_norm(given[f"{norm}_weight"], found, given["ln_bias"] if norm == "ln" else None)
    torch.testing.assert_close(weight, given[reported + "norm_weight_after"], **TOLERANCE)
    torch.testing.assert_close(
        fold_into_columns(own[0], found), given[reported + "weight0_after"], **TOLERANCE
    )
    assert (bias is None) == (norm == "rms")
    if bias is not None:
        torch.testing.assert_close(bias, given[reported + "norm_bias_after"], **TOLERANCE)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_alpha_is_the_activations_share(alpha: float) -> None:
    """max|x|^alpha / max|w|^(1 - alpha), the maximum over all weights, whatever their signs."""
    own = [torch.tensor([[0.25, 0.25], [0.125, -0.1]]), torch.tensor([[-0.5, 0.0]])]
    found = smoothing_scales(torch.tensor([128.0, 4.0]), own, alpha)
    expected = [128**alpha / 0.5 ** (1 - alpha), 4**alpha / 0.25 ** (1 - alpha)]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_a_dead_channel_keeps_its_scale(golden: Path) -> None:
    given = arrays(golden, "smoothquant_scales")
    own = [given[f"weight{i}"] for i in range(3)]
    paper, ours = (smoothing_scales(given["act_max"], own, keep_dead=keep) for keep in (False, True))
    assert ours[DEAD] == 1
    assert paper[DEAD] == pytest.approx(1e-5)
    differs = (paper != ours).nonzero().flatten().tolist()
    assert differs == [i for i in range(96) if given["act_max"][i] <= 1e-5]


@pytest.mark.parametrize("weight", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("activation", ["per_tensor", "per_token"])
def test_fake_quantization_is_the_reference_s(golden: Path, weight: str, activation: str) -> None:
    given = arrays(golden, "smoothquant_w8a8")
    fakes = {"per_tensor": fake_per_tensor, "per_token": fake_per_token}
    w = (fake_per_channel if weight == "per_channel" else fake_per_tensor)(given["weight"])
    x = fakes[activation](given["x"])
    torch.testing.assert_close(w, given[f"weight_fake_{weight}"], **TOLERANCE)
    torch.testing.assert_close(x, given[f"x_fake_{activation}"], **TOLERANCE)
    y = x @ w.T + given["bias"]
    name = f"y_w_{weight}_a_{activation}"
    torch.testing.assert_close(y, given[name], rtol=1e-5, atol=1e-5)
    steps = (fakes[activation](y) - given[name + "_outq"]).abs() > 1e-5
    assert float(steps.float().mean()) < 2e-3  # a value between two steps may fall to either


@pytest.mark.parametrize("static", [False, True])
def test_smoothing_beats_none_where_channels_are_loud(static: bool) -> None:
    x, own = inputs(400, 160), [weights(32, 160), weights(48, 160, seed=1)]
    found = search_smoothing(own, x[:200], static=static)
    assert found.exponent > 0
    assert found.error < 0.5 * found.plain_error

    def error(scales: torch.Tensor) -> float:
        quiet = x[200:] / scales
        near = (
            fake_per_tensor(quiet, (x[:200].abs().amax(0) / scales).max())
            if static
            else fake_per_token(quiet)
        )
        pairs = [(near @ fake_per_channel(w * scales).T, x[200:] @ w.T) for w in own]
        return sum(float((a - b).square().sum()) for a, b in pairs)

    assert error(found.scales) < 0.6 * error(torch.ones(160))


def test_quiet_inputs_are_left_alone() -> None:
    x = torch.ones(20, 64) * torch.randn(20, 1, generator=torch.Generator().manual_seed(1)).sign()
    found = search_smoothing([weights(8, 64).sign()], x)
    assert found.exponent == 0
    assert bool((found.scales == 1).all())
    assert found.error == found.plain_error


def test_channels_of_one_class_share_a_scale() -> None:
    classes = value_rows(num_heads=4, num_kv_heads=2, head_dim=8)
    assert classes[8:16].tolist() == classes[:8].tolist() == list(range(8))
    for scales in (
        smoothing_scales(inputs(50, 32).abs().amax(0), [weights(6, 32)], classes=classes),
        search_smoothing([weights(6, 32)], inputs(50, 32), classes=classes).scales,
    ):
        assert torch.equal(scales[:8], scales[8:16])
        assert torch.equal(scales[16:24], scales[24:])
        assert not torch.equal(scales[:8], scales[16:24])


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="alpha is out of range"):
        smoothing_scales(torch.ones(4), [torch.ones(2, 4)], 1.5)
    with pytest.raises(ConfigError, match="different widths"):
        smoothing_scales(torch.ones(4), [torch.ones(2, 5)])
    with pytest.raises(ConfigError, match="different widths"):
        search_smoothing([], torch.ones(2, 4))
