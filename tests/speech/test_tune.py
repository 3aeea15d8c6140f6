"""``tune`` measures the shapes of an encoder beside those of decoder steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ingot.building.tuner import tune_model
from ingot.building.tuner.tile_search import encoder_steps
from ingot.building.tuner.tuned_steps import Steps
from ingot.engine.assembly import model_of
from ingot.engine.manifest import Manifest

CPU = torch.device("cpu")


class NoTimer:
    """Runs nothing and takes no time."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        return lambda: 2.0


@pytest.mark.parametrize(
    ("batch", "encoded"), [(1, ["m64"]), (3, ["m64", "m128"]), (9, ["m64", "m128", "m256", "m512"])]
)
def test_the_norms_of_an_encoder_are_measured_at_1_2_4_and_8_windows(
    tiny_engine: Path, batch: int, encoded: list[str]
) -> None:
    manifest = Manifest.read(tiny_engine)
    limits = manifest.build.replace(max_batch_size=batch, max_seq_len=16)
    found = tune_model(model_of(manifest), limits, CPU, ops=["layer_norm"], timer=NoTimer())  # type: ignore[arg-type]
    keys = {choice.place.key for choice in found.choices}
    decoded = {1: ["m1", "m16"], 3: ["m1", "m8", "m16"], 9: ["m1", "m8", "m16"]}[batch]
    assert keys == {f"{rows}_h32" for rows in (*decoded, *encoded)}  # a window has 40 positions
    assert not found.dropped


def test_an_encoder_on_trial_is_short_and_takes_the_longest_input(tiny_engine: Path) -> None:
    manifest = Manifest.read(tiny_engine)
    limits = manifest.build.replace(max_batch_size=8)
    steps = Steps(model_of(manifest), limits, CPU)
    kinds = encoder_steps(manifest.model, limits)
    with torch.inference_mode():
        for kind, windows in zip(kinds, (1, 2, 4, 8), strict=True):
            (encoded,) = steps.computed(kind)
            assert torch.equal(steps.step(kind)(), encoded)
            assert encoded.shape == (windows * 40, 32)
            assert encoded.isfinite().all()
            assert len(encoded.unique(dim=0)) == len(encoded), "windows that are copies of each other"
    assert encoder_steps(manifest.model.replace(wiring="none", encoder=None), limits) == []


@pytest.mark.parametrize(("dtype", "encoder", "measured"), [("fp32", "fp16", False), ("fp16", "bf16", True)])
def test_halves_of_two_sizes_share_no_tiles(
    tiny_engine: Path, dtype: str, encoder: str, measured: bool
) -> None:
    """Tiles are measured for values of the decoder's size; an encoder of another has the defaults."""
    manifest = Manifest.read(tiny_engine)
    limits = manifest.build.replace(max_batch_size=1, max_seq_len=16, dtype=dtype, encoder_dtype=encoder)
    found = tune_model(model_of(manifest), limits, CPU, ops=["layer_norm"], timer=NoTimer())  # type: ignore[arg-type]
    keys = {choice.place.key for choice in found.choices}
    assert ("m64_h32" in keys) == measured
    assert {"m1_h32", "m16_h32"} <= keys
