"""Whether a module of the engine is wrong by itself: on the original's input, beside its own rounding.

The expected output is the original's, plus what rounding the *input* to the engine's dtype changes in the
checking decoder. So the input's rounding is no difference. The noise is what rounding in the engine's
arithmetic does in the checking decoder, which shares no code with the module; on a CPU that splits inputs of
products (quant/schemes/in_panels.py), also what rounding them to 23 bits does. Inputs that the module rounds
to few bits are put on the grid of the quantized values first, so that both sides have the same quantized
rows. Then the module gets them as they were, to show that it rounds them right; there a value in the middle
between two may fall either way.

An engine in 16 bits is also held to its config and its weights: computed by the checking decoder in fp32 they
must give the original's output to fp32's accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from ingot.engine.engine_loader import Engine
from ingot.engine.reference_run import EXACT, FINER, Arithmetic
from ingot.layers.linear import Linear
from ingot.measure.align.stage_difference import (
    Common,
    Difference,
    at_least,
    common_factors,
    common_turns,
    measure,
    rms,
)
from ingot.measure.align.stages.isolated_module import Isolated, reader_of
from ingot.measure.align.stages.plain_stages import Pass, PlainStages
from ingot.measure.align.stages.stage_names import StageFile, inner_places_of, layer_of, places_of
from ingot.measure.align.stages.staged_run import Stored
from ingot.quant.schemes.in_panels import splits_here

MULTIPLE = 4.0  # floors that count as noise (docs/align.md)
_SIGMAS = 6.0  # standard deviations of noise that many values may be off in common
_UNITS = 0.125  # units of the engine's rounding that count as noise if a floor is zero
_FP32_UNITS = 3.0  # of fp32: CUDA's rsqrt is up to 2 units off, and its input is rounded, too
_IN_COMMON = 2.0  # times the noise of attention's values: those of a head share a token's weights
_TERMS = 0.25  # of eps sqrt(K): another order of a sum of K terms
_FP32 = torch.float32


def least_of(dtype: torch.dtype) -> float:
    """The least noise of a stage in a whole run (relative L2): one unit of rounding, three in fp32."""
    return (_FP32_UNITS if dtype == _FP32 else 1.0) * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Alone(Difference):
    """How far a module by itself is from the expected output, at its place that is farthest off.

    Attributes:
        place: the stage, or a part of it (``stage_names.PLACES``).
        floor: relative L2 that rounding explains; ``limit`` is that of ``relative``.
        common: by how much values are off in common; ``common_limit`` is its limit.
        on_grid: whether the input was put on the grid of quantized values.
        of_config: whether it is the result of config and weights in fp32, and not the module's own output.
    """

    place: str
    floor: float
    limit: float
    common: float
    common_limit: float
    on_grid: bool = False
    of_config: bool = False

    @property
    def share(self) -> float:
        """How far out it is: 1 is at the limit."""
        return max(_share(self.relative, self.limit), _share(self.common, self.common_limit))

    @property
    def is_wrong(self) -> bool:
        return not self.share <= 1


@dataclass(frozen=True)
class Draw:
    """One draw of a place's noise: its exact and lower values, and their distance (relative L2)."""

    floor: float
    exact: torch.Tensor
    low: torch.Tensor


def _share(value: float, limit: float) -> float:
    return value / limit if math.isfinite(value) else math.inf


class AloneJudge:
    """Judges modules of an engine (its weights: ``stored``) on an original's stages in dtype ``base``."""

    def __init__(self, engine: Engine, stored: Stored, expected: StageFile, base: torch.dtype) -> None:
        model, dtype, device = engine.model, engine.dtype, engine.device
        self.model, self.dtype, self.expected = model, dtype, expected
        self.coarse = max((dtype, base), key=lambda one: torch.finfo(one).eps)
        self._splits = dtype == _FP32 and device.type == "cpu" and splits_here()
        self.isolated = Isolated(model, dtype, device, expected)
        self._on_grid = Isolated(model, dtype, device, expected, on_grid=True)
        self._plain = PlainStages(stored, model, expected, device)

    def of(self, step: int, stage: str) -> Alone | None:
        """The worst of the stage's places; None if no input is recorded."""
        places = [*places_of(stage), *(inner_places_of(stage) if self.coarse != _FP32 else [])]
        found = [alone for place in places for alone in self._at(step, place)]
        return max(found, key=lambda alone: alone.share, default=None)

    def sides(self, step: int, alone: Alone) -> tuple[torch.Tensor, torch.Tensor]:
        """The expected and the engine's values at a place, on the host."""
        if alone.of_config:
            expected, got = self.expected.get(step, alone.place), self._of_config(step, alone.place)
        else:
            expected = self._wanted(step, alone.place, on_grid=alone.on_grid)
            got = (self._on_grid if alone.on_grid else self.isolated).run(step, alone.place)
        assert expected is not None
        assert got is not None
        return expected.float(), got

    def _at(self, step: int, place: str) -> Iterator[Alone]:
        reader = self._reader(place)
        rounds = isinstance(reader, Linear) and reader.scheme.rounds
        for on_grid in (True, False) if rounds else (False,):
            wanted = self._wanted(step, place, on_grid=on_grid)
            got = (self._on_grid if on_grid else self.isolated).run(step, place)
            if wanted is None or got is None:
                continue
            draw = self._draw(step, place, self._low, self.dtype, on_grid=on_grid, splits=self._splits)
            ties = 0.0
            if rounds and not on_grid:  # the closest call of every row, and every exact tie, the other way
                exact = self._plain.at(place, step, self._exact(on_grid=False))
                flipped = self._plain.at(place, step, Pass(replace(EXACT, flips=True), self.dtype))
                assert exact is not None
                assert flipped is not None
                ties = measure(exact, flipped).relative
            yield self._judged(place, wanted, got, draw, ties, on_grid=on_grid)
        if self.dtype != _FP32 and self.coarse == self.dtype:
            expected, meant = self.expected.get(step, place), self._of_config(step, place)
            if expected is not None and meant is not None:
                floor = self._draw(step, place, FINER, _FP32, on_grid=rounds).floor
                yield Alone(
                    **vars(measure(expected, meant)),
                    place=place,
                    floor=floor,
                    limit=MULTIPLE * floor + _FP32_UNITS * torch.finfo(_FP32).eps,
                    common=0.0,
                    common_limit=1.0,
                    of_config=True,
                )

    def _wanted(self, step: int, place: str, *, on_grid: bool) -> torch.Tensor | None:
        """The module's expected output, fp64; at a place that no original records that of the checking
        decoder. None if its input is not recorded.
        """
        expected, exact = self.expected.get(step, place), self._plain.at(place, step, self._exact(on_grid))
        if exact is None or (expected is not None and expected.shape != exact.shape):
            return None
        if expected is None:
            return exact.double() if place.endswith((".query", ".keys")) else None
        if self.dtype == _FP32:
            return expected.double()
        meant = self._of_config(step, place)
        assert meant is not None
        return expected.double() + (exact.double() - meant.double())

    def _judged(
        self, place: str, wanted: torch.Tensor, got: torch.Tensor, draw: Draw, ties: float, *, on_grid: bool
    ) -> Alone:
        floor = draw.floor
        units = (_FP32_UNITS if self.coarse == _FP32 else _UNITS) * torch.finfo(self.coarse).eps
        least = units + ties + (floor if self.coarse == _FP32 else 0.0)
        tests = list(self._common(place, wanted, got, draw, ties))
        worst = max(tests, key=lambda one: one.off / (_SIGMAS * one.noise + least))
        return Alone(
            **vars(measure(wanted, got)),
            place=place,
            floor=floor + ties,
            limit=MULTIPLE * (floor + ties) + units,
            common=worst.off,
            common_limit=_SIGMAS * worst.noise + least,
            on_grid=on_grid,
        )

    def _common(
        self, place: str, wanted: torch.Tensor, got: torch.Tensor, draw: Draw, ties: float
    ) -> Iterator[Common]:
        """Of all values, of each of attention's heads, and of the pairs of channels that positions rotate.

        Values of a head that share a token's attention weights err in common: their noise counts twice, and
        is at least that of the draw. A tie rotates a small pair of channels farther than others.
        """
        kind, config = place.rpartition(".")[2], self.model.config
        floor = draw.floor
        if not place.startswith("layers.") or kind not in ("query", "keys", "attended"):
            yield from common_factors(wanted, got, floor)
            return
        heads = config.num_kv_heads if kind == "keys" else config.num_heads
        times = _IN_COMMON if kind == "attended" else 1.0
        floor *= times
        drawn = times * rms(one.off for one in common_factors(draw.exact, draw.low, floor, heads))
        yield from at_least(common_factors(wanted, got, floor), drawn / math.sqrt(heads))
        yield from at_least(common_factors(wanted, got, floor, heads), drawn)
        if config.rope is not None and kind != "attended":
            turns = (math.hypot(floor, ties), heads, config.rope.dim)
            drawn = rms(one.off for one in common_turns(draw.exact, draw.low, *turns))
            yield from at_least(common_turns(wanted, got, *turns), drawn)

    def _exact(self, on_grid: bool) -> Pass:
        return Pass(EXACT, self.dtype, on_grid)

    @property
    def _low(self) -> Arithmetic:
        return FINER if self.coarse == _FP32 else Arithmetic(_FP32, self.coarse)

    def _of_config(self, step: int, place: str) -> torch.Tensor | None:
        """The result of the engine's config and weights on the original's input, in fp32."""
        return self._plain.at(place, step, Pass(EXACT, _FP32))

    def _draw(
        self,
        step: int,
        place: str,
        low: Arithmetic,
        dtype: torch.dtype,
        *,
        on_grid: bool,
        splits: bool = False,
    ) -> Draw:
        exact = self._plain.at(place, step, Pass(EXACT, dtype, on_grid))
        other = self._plain.at(place, step, Pass(low, dtype, on_grid, splits))
        assert exact is not None
        assert other is not None
        floor = measure(exact, other).relative
        return Draw(max(floor, self._least) if low is FINER else floor, exact, other)

    @cached_property
    def _least(self) -> float:
        config = self.model.config
        terms = max(config.hidden_size, config.intermediate_size)
        return _TERMS * torch.finfo(torch.float32).eps * math.sqrt(terms)

    def _reader(self, place: str) -> nn.Module | None:
        """The linear layer that computes the place."""
        layer, kind = layer_of(place), place.rpartition(".")[2]
        if place == "logits":
            return self.model.lm_head
        if kind in ("cross_keys", "cross_values"):
            return self.model.get_submodule(f"{place.rpartition('.')[0]}.encoder_attn.kv_proj")
        if place == "encoder.projector":
            return self.model.get_submodule(place)
        if layer is None and not (place.startswith("encoder.") and "layers." in place):
            return None
        return reader_of(self.model.get_submodule(place.rpartition(".")[0]), kind)
