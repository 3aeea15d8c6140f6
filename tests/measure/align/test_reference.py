"""What stands for an original: whose weights, rounded to what; and what is said of fewer bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.config.half_dtypes import HalfDtypes
from ingot.config.quantization.quant_config import QuantConfig
from ingot.device import dtype_name
from ingot.measure.align.align_session import _quant_text
from ingot.measure.align.original import OtherEngine, round_weights
from ingot.measure.align.stages.staged_run import RoundedWeights

VALUE = 1.0 + 2**-12  # fp32 has it, and neither of 16 bits
NAMES = (
    "layers.0.mlp.down_proj.weight",
    "layers.0.mlp.down_proj.bias",
    "norm.weight",
    "norm.bias",
    "x.scales",
    "ids",
)


class Stored:
    """Tensors by name, of which one is of integers."""

    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.released = dtype, 0

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.tensor([3]) if name == "ids" else torch.tensor([VALUE]).to(self.dtype)

    def release(self) -> None:
        self.released += 1


@pytest.mark.parametrize("wide_norms", [False, True])
@pytest.mark.parametrize("theirs", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ours", [torch.float32, torch.float16, torch.bfloat16])
def test_another_engine_s_weights_are_rounded_to_a_coarser_dtype(
    ours: torch.dtype, theirs: torch.dtype, wide_norms: bool
) -> None:
    """And to no finer one; norms that are kept wide stay, as do scales and integers."""
    weights = Stored(theirs)
    config = SimpleNamespace(wide_norms=wide_norms)
    stored: Any = SimpleNamespace(weights=weights, model=SimpleNamespace(config=config))
    rounded = RoundedWeights(stored, HalfDtypes.of(dtype_name(ours)))
    order = [torch.float32, torch.float16, torch.bfloat16]
    coarser = max(ours, theirs, key=order.index)
    for name in NAMES:
        kept = name.endswith("scales") or (wide_norms and "norm" in name)
        wanted = torch.int64 if name == "ids" else theirs if kept else coarser
        assert rounded[name].dtype == wanted, name
        assert torch.equal(rounded[name], weights[name].to(wanted))
    rounded.release()
    assert (weights.released, rounded.device) == (1, weights.device)


@pytest.mark.parametrize("wide_norms", [False, True])
def test_a_class_s_weights_are_rounded_in_place(wide_norms: bool) -> None:
    """Norms that an engine keeps wide, and buffers, stay."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(1, 1), torch.nn.LayerNorm(1)
            self.register_buffer("table", torch.tensor([VALUE]))

    model = Model()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, VALUE)
    round_weights(model, HalfDtypes.of("bf16"), wide_norms=wide_norms)
    found = {name: float(value.flatten()[0]) for name, value in model.state_dict().items()}
    norm = VALUE if wide_norms else 1.0
    assert found == {
        "linear.weight": 1.0,
        "linear.bias": 1.0,
        "norm.weight": norm,
        "norm.bias": norm,
        "table": VALUE,
    }
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


DENSE, W8A16, W8A8 = QuantConfig(), QuantConfig("w8a16"), QuantConfig("w8a8")


@pytest.mark.parametrize(
    ("ours", "other", "says"),
    [
        (DENSE, DENSE, None),
        (W8A16, W8A16, W8A16.summary),
        (W8A16, DENSE, f"{W8A16.summary}; the reference is {DENSE.summary}: differences are expected"),
        (DENSE, W8A16, f"{DENSE.summary}; the reference is {W8A16.summary}: differences are expected"),
        (W8A8, W8A16, f"{W8A8.summary}; the reference is {W8A16.summary}: differences are expected"),
    ],
)
def test_what_is_said_of_fewer_bits_beside_another_engine(
    ours: QuantConfig, other: QuantConfig, says: str | None
) -> None:
    source = OtherEngine.__new__(OtherEngine)
    source.manifest = SimpleNamespace(quant=other)  # type: ignore[assignment]
    target: Any = SimpleNamespace(quant=ours)
    assert _quant_text(target, source) == says


@pytest.mark.parametrize(
    ("ours", "checkpoint", "says"),
    [
        (DENSE, "folder", None),
        (DENSE, None, None),
        (W8A16, None, "; the trace has the original's weights: differences are expected"),
        (W8A16, "folder", "; the reference computes with these weights, dequantized"),
        (
            W8A8,
            "folder",
            "; the reference computes with these weights, dequantized, and rounds activations as it does",
        ),
    ],
)
def test_what_is_said_of_fewer_bits_beside_a_checkpoint_or_a_trace(
    ours: QuantConfig, checkpoint: str | None, says: str | None
) -> None:
    target: Any = SimpleNamespace(quant=ours)
    source: Any = SimpleNamespace(checkpoint=checkpoint)
    assert _quant_text(target, source) == (None if says is None else ours.summary + says)
