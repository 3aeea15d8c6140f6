"""Hugging Face's class as the original.

Owns running it under a trace, in fp32 and with noise. Knows no verdict.

    name, choices = record_class(folder, device, None, noise, paths, cases, steps=4)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.align.precision import Precision, round_weights
from ingot.align.stages import hf_patterns
from ingot.align.trace import run_steps, trace
from ingot.compare.huggingface import load_class
from ingot.engine.int8_inputs import Int8Input, rounding


def record_class(
    folder: Path,
    device: torch.device,
    num_layers: int | None,
    noise: Precision,
    paths: Sequence[tuple[Path, Path]],
    cases: Sequence[Sequence[int]],
    steps: int,
    inputs: Sequence[Int8Input] = (),
) -> tuple[str, list[list[int]]]:
    """Trace the class on every case in fp32, and then, loaded no second time, in another precision.

    Args:
        paths: of each case the file in fp32 and the one with noise.
        inputs: of the products that round them to 8 bits; with noise the closest calls go the other way.

    Returns:
        The class's name and the greedy choices of each case in fp32, which both runs are fed.

    Raises:
        CheckpointError: the class cannot load the checkpoint.
    """
    widest = max(torch.float32, noise.compute, key=lambda dtype: dtype.itemsize)
    model = load_class(
        folder,
        torch.float32,  # it holds every value of a checkpoint
        device,
        "--device cuda, or a trace as --reference",
        num_layers=num_layers,
        widest=widest,
        attention="eager",
        flag="--original ingot",
    )
    names = hf_patterns(name for name, _ in model.named_modules())
    choices = []
    for (path, _), ids in zip(paths, cases, strict=True):
        with trace(model, path, names), rounding(model, inputs):
            choices.append(run_steps(model, ids, steps))
    _lower(model, noise)
    for (_, path), ids, forced in zip(paths, cases, choices, strict=True):
        with trace(model, path, names), rounding(model, inputs, flips=True):
            run_steps(model, ids, steps, forced)
    return type(model).__name__, choices


def _lower(model: Any, precision: Precision) -> None:
    """Round a model in fp32 where it stands, and compute so."""
    # Eager attention has an fp32 softmax inside; the other kind has no softcap.
    if precision.compute == torch.float64 and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    round_weights(model, precision.weights)
    # not the buffers: rotary frequencies stay fp32, as when it is loaded
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.compute)
