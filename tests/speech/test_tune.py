"""``tune`` measures the shapes of an encoder beside those of decoder steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ingot.engine.assemble import model_of
from ingot.engine.manifest import Manifest
from ingot.engine.tuner import tune_model
from ingot.engine.tuner.search import encoder_steps
from ingot.engine.tuner.steps import Steps

CPU = torch.device("cpu")


class NoTimer:
    """Runs nothing and takes no time."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        return lambda: 2.0


def test_the_norms_of_an_encoder_are_measured_at_a_whole_window(tiny_engine: Path) -> None:
    manifest = Manifest.read(tiny_engine)
    limits = manifest.build.replace(max_batch_size=2, max_seq_len=16)
    found = tune_model(model_of(manifest), limits, CPU, ops=["layer_norm"], timer=NoTimer())  # type: ignore[arg-type]
    keys = {choice.place.key for choice in found.choices}
    assert keys == {"m1_h32", "m8_h32", "m16_h32", "m64_h32"}  # 40 positions are in the last
    assert not found.dropped


def test_an_encoder_on_trial_is_short_and_takes_the_longest_input(tiny_engine: Path) -> None:
    manifest = Manifest.read(tiny_engine)
    (kind,) = encoder_steps(manifest.model)
    steps = Steps(model_of(manifest), manifest.build, CPU)
    with torch.inference_mode():
        (encoded,) = steps.computed(kind)
        assert torch.equal(steps.step(kind)(), encoded)
    assert encoded.shape == (40, 32)
    assert encoded.isfinite().all()
    assert encoder_steps(manifest.model.replace(kind="text", encoder=None)) == []
