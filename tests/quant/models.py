"""A checkpoint's decoder in plain PyTorch, with some of its tensors replaced.

Owns the few lines that tests of whole models share. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ingot.building.calibration.calibrate import CalibratedLayer, Load, Statistic, Walk, dense_model
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import Assembly, build_config
from ingot.engine.reference_run import EXACT, Feed, ReferenceRun, SequenceSpan
from ingot.layers.decoder import Decoder

CPU = torch.device("cpu")
S = TypeVar("S", bound=Statistic)


def opened(folder: Path, max_seq_len: int = 64) -> tuple[Decoder, Load]:
    """Empty modules and what gives their tensors, fp32."""
    assembly = planned(folder, QuantConfig(), max_seq_len=max_seq_len)
    return dense_model(assembly), partial(assembly.load, checkpoint=open_checkpoint(folder))


def planned(folder: Path, quant: QuantConfig, dtype: str = "fp32", max_seq_len: int = 64) -> Assembly:
    """What a build of a checkpoint will hold."""
    with open_checkpoint(folder) as source:
        return Assembly.of(source, build_config(source, dtype, 1, max_seq_len, None), quant)


def layers_of(walk: Walk[S], count: int = 2) -> Iterator[CalibratedLayer[S]]:
    """The first layers of a walk, each as it was observed; it goes on when the next one is asked for."""
    for name in walk.layers[:count]:
        layer = walk.observe(name)
        yield layer
        walk.advance(layer)


class Changed:
    """Tensors of a checkpoint, some of them replaced."""

    device = CPU

    def __init__(self, load: Load, changes: Mapping[str, torch.Tensor]) -> None:
        self._load = load
        self._changes = changes

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._changes[name] if name in self._changes else self._load(name)

    def release(self) -> None:
        """Nothing is held."""


def log_probs(
    decoder: Decoder,
    load: Load,
    samples: Sequence[Sequence[int]],
    changes: Mapping[str, torch.Tensor] | None = None,
    feed: Feed | None = None,
) -> torch.Tensor:
    """Log-probabilities of the next token after every token, [T, vocab_size]."""
    run = ReferenceRun(decoder, Changed(load, changes or {}), EXACT, single=True, feed=feed)
    spans = [SequenceSpan(i, tuple(ids), 0, decoder.rope_offset(len(ids))) for i, ids in enumerate(samples)]
    hidden = run.embed(spans)
    for index in range(len(decoder.layers)):
        hidden = run.layer(index, hidden, spans, lambda name, x: None)
    return run.logits(run.final_norm(hidden, lambda name, x: None)).log_softmax(-1)


def divergence(exact: torch.Tensor, near: torch.Tensor) -> float:
    """Mean KL(exact ‖ near) in nats."""
    return float((exact.exp() * (exact - near)).sum(-1).mean())
