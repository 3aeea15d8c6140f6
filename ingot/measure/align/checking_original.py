"""The checking decoder as the original: its stages written to files, exact and with noise.

Owns its two runs over an engine's or a checkpoint's weights. Shares no code with the modules and kernels that
an engine runs. Knows no verdict.

    record_checked(stored, folder, cases, steps, noise_of(torch.float16))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ingot.building.int8_inputs import Int8Input
from ingot.engine.reference_run import EXACT, Arithmetic, Feed
from ingot.layers.linear import any_rounded
from ingot.measure.align.encoder_inputs import Given
from ingot.measure.align.stages.stage_names import OWN_NAMES
from ingot.measure.align.stages.staged_run import StagedRun, Stored, run_encoder, run_tokens
from ingot.measure.align.trace import TraceWriter

PathOf = Callable[[str, int], Path]


def noise_of(dtype: torch.dtype, *, flips: bool) -> Arithmetic:
    """The arithmetic whose distance from fp32 is noise; ``flips`` where activations are rounded."""
    if dtype == torch.float32:
        return Arithmetic(torch.float64, flips=flips)
    return Arithmetic(torch.float32, dtype, flips=flips)


def record_checked(
    stored: Stored,
    paths: PathOf,
    cases: Sequence[Sequence[int]],
    steps: int,
    dtype: torch.dtype,
    *,
    inputs: Sequence[Int8Input] = (),
    given: Given | None = None,
    forced: Sequence[list[int]] | None = None,
) -> list[list[int]]:
    """Write every case twice, as ``expected`` in fp32 and as ``noise`` in ``dtype`` (fp64 for fp32).

    Args:
        paths: the file of a run and a case.
        inputs: those that are rounded to few bits beside what ``stored`` rounds by itself.
        forced: tokens to feed behind each prompt; None: the greedy choices of the first run.

    Returns:
        The greedy choices after each prompt and each step.
    """
    flips = bool(inputs) or any_rounded(stored.model)
    choices: list[list[int]] = []
    for i, ids in enumerate(cases):
        fed = None if forced is None else forced[i]
        exact = _Recorder(stored, paths("expected", i), EXACT, inputs, given)
        choices.append(exact.run(ids, steps, fed))
        noisy = _Recorder(stored, paths("noise", i), noise_of(dtype, flips=flips), inputs, given)
        noisy.run(ids, steps, choices[-1] if fed is None else fed)
    return choices


class _Recorder(StagedRun):
    """Writes every stage."""

    def __init__(
        self,
        stored: Stored,
        path: Path,
        arithmetic: Arithmetic,
        inputs: Sequence[Int8Input],
        given: Given | None,
    ) -> None:
        feed = _feed(inputs, flips=arithmetic.flips)
        super().__init__(stored.model, stored.weights, arithmetic, feed=feed)
        self._stored, self._given = stored, given
        self._writer = TraceWriter(path)
        self._stages: dict[str, None] = {}  # in order
        self._step = 0

    def reached(self, stage: str, computed: torch.Tensor) -> torch.Tensor:
        self._writer.add(f"{self._step}/{stage}", computed)
        self._stages.setdefault(stage)
        return computed

    @torch.inference_mode()
    def run(self, ids: Sequence[int], steps: int, forced: Sequence[int] | None) -> list[int]:
        """The prompt and cached steps; the greedy choices after each."""
        try:
            choices = self._run(ids, steps, forced)
        except BaseException:
            self._writer.abandon()
            raise
        self._writer.metadata |= {"dtype": "float32", "names": OWN_NAMES}
        self._writer.metadata |= {"model": self.config.architecture, "stages": json.dumps([*self._stages])}
        self._writer.close()
        return choices

    def _run(self, ids: Sequence[int], steps: int, forced: Sequence[int] | None) -> list[int]:
        encodes = self._given is not None
        if self._given is not None:
            self._encode(self._given)
        choices: list[int] = []
        new, start = list(ids), 0
        for self._step in range(steps + 1):
            self._writer.add(f"{self._step}/input_ids", torch.tensor(new, dtype=torch.int64))
            logits = run_tokens(self, self._stored.span(new, start, len(ids), encodes=encodes))
            choices.append(int(logits[-1].argmax()))
            start += len(new)
            new = [choices[-1] if forced is None else [*forced, 0][self._step]]
        return choices

    def _encode(self, given: Given) -> None:
        """The features, in the noisy run as a sound preparation may round them, and the encoder."""
        shown = given.features if self.arithmetic == EXACT else given.nearly
        self._writer.add(f"0/{given.stage}", given.shown(shown))
        self._stages.setdefault(given.stage)
        run_encoder(self, given.features)


def _feed(inputs: Sequence[Int8Input], *, flips: bool) -> Feed | None:
    by_name = {one.name: one for one in inputs}

    def feed(name: str, x: torch.Tensor) -> torch.Tensor:
        one = by_name.get(name)
        return x if one is None else one.rounded(x, flips=flips)

    return feed if by_name else None
