"""Whether a module of the engine is wrong by itself: on the original's input, beside its own rounding.

Owns what is expected of a module in the engine's arithmetic, its noise, and two tests: the distance, and what
the errors of many values have in common. Knows no stage's place in a model and no report.

    judge = AloneJudge(engine, stored, expected, base=torch.float32)
    judge.of(step=0, stage="layers.3.mlp")

What is expected is what the original had, plus what the checking decoder says that rounding the *input* to
the engine's dtype changes. So the input's rounding is no difference. The noise is what rounding in the
engine's arithmetic does in the checking decoder, which shares no code with the module. Inputs that the module
rounds to few bits are put on the grid of the quantized values first: both sides have the same quantized rows.
Then the module gets them as they were, to show that it rounds them rightly; there a value in the middle
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

MULTIPLE = 4.0  # floors that count as noise (docs/align.md)
_SIGMAS = 6.0  # standard deviations of noise that many values may be off together
_UNITS = 0.125  # units of the engine's rounding that count as noise where a floor is zero
_FP32_UNITS = 3.0  # of fp32: CUDA's tables put rsqrt 2 from right, and what it is given is rounded, too
_TOGETHER = (
    2.0  # times the noise of attention's values: those of a head share a token's weights, and err together
)
_TERMS = 0.25  # of eps sqrt(K): another order of a sum of K terms
_FP32 = torch.float32


def least_of(dtype: torch.dtype) -> float:
    """What counts as noise of a stage in a whole run where its floor is zero (relative L2): one unit of the
    dtype's rounding, in fp32 as many as of a module.
    """
    return (_FP32_UNITS if dtype == _FP32 else 1.0) * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Alone(Difference):
    """How far a module by itself is from what is expected, at the place of it that is farthest off.

    Attributes:
        place: the stage, or a part of it (``stages.PLACES``).
        floor: relative L2 that rounding explains; ``limit`` is that of ``relative``.
        common: by how much values are off together, and ``common_limit``.
        on_grid: whether the input was put on the grid of quantized values.
        of_config: whether it is what config and weights give in fp32, and not the module's own output.
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
        """Whether one of both is beyond its limit."""
        return not self.share <= 1


@dataclass(frozen=True)
class Draw:
    """One draw of the noise at a place: its values, exact and in the lower arithmetic, and how far these are
    apart (relative L2).
    """

    floor: float
    exact: torch.Tensor
    low: torch.Tensor


def _share(value: float, limit: float) -> float:
    return value / limit if math.isfinite(value) else math.inf


class AloneJudge:
    """Judges modules of an engine on the stages of an original.

    Args:
        stored: what the engine stores.
        expected: the original's run.
        base: dtype that the original's stages were computed in.
    """

    def __init__(self, engine: Engine, stored: Stored, expected: StageFile, base: torch.dtype) -> None:
        model, dtype, device = engine.model, engine.dtype, engine.device
        self.model, self.dtype, self.expected = model, dtype, expected
        self.coarse = max((dtype, base), key=lambda one: torch.finfo(one).eps)
        self.isolated = Isolated(model, dtype, device, expected)
        self._on_grid = Isolated(model, dtype, device, expected, on_grid=True)
        self._plain = PlainStages(stored, model, expected, device)

    def of(self, step: int, stage: str) -> Alone | None:
        """The worst of the stage's places; None where no input is recorded."""
        places = [*places_of(stage), *(inner_places_of(stage) if self.coarse != _FP32 else [])]
        found = [alone for place in places for alone in self._at(step, place)]
        return max(found, key=lambda alone: alone.share, default=None)

    def sides(self, step: int, alone: Alone) -> tuple[torch.Tensor, torch.Tensor]:
        """What is expected at a place, and what there is, on the host."""
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
            draw = self._draw(step, place, self._low, self.dtype, on_grid=on_grid)
            ties = self._ties(step, place) if rounds and not on_grid else 0.0
            yield self._judged(place, wanted, got, draw, ties, on_grid=on_grid)
        if self.dtype != _FP32 and self.coarse == self.dtype:
            expected, meant = self.expected.get(step, place), self._of_config(step, place)
            if expected is not None and meant is not None:
                floor = self._draw(step, place, FINER, _FP32, on_grid=rounds).floor
                limit = MULTIPLE * floor + _FP32_UNITS * torch.finfo(_FP32).eps
                off = vars(measure(expected, meant))
                yield Alone(
                    **off, place=place, floor=floor, limit=limit, common=0.0, common_limit=1.0, of_config=True
                )

    def _wanted(self, step: int, place: str, *, on_grid: bool) -> torch.Tensor | None:
        """What is expected of the module, fp64; of a place that no original records by the checking decoder
        alone. None where its input is not recorded.
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
        """Of all values; of attention's heads one by one; of the pairs of channels that positions turn.

        Values of a head that share a token's attention weights err together: their noise counts twice, and
        is at least what the draw's have in common. A tie turns a small pair of channels farther than others.
        """
        kind, config = place.rpartition(".")[2], self.model.config
        floor = draw.floor
        if not place.startswith("layers.") or kind not in ("query", "keys", "attended"):
            yield from common_factors(wanted, got, floor)
            return
        heads = config.num_kv_heads if kind == "keys" else config.num_heads
        times = _TOGETHER if kind == "attended" else 1.0
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
        """The arithmetic whose distance from fp32 is noise."""
        return FINER if self.coarse == _FP32 else Arithmetic(_FP32, self.coarse)

    def _of_config(self, step: int, place: str) -> torch.Tensor | None:
        """What the engine's config and weights give for the original's input, in fp32."""
        return self._plain.at(place, step, Pass(EXACT, _FP32))

    def _draw(self, step: int, place: str, low: Arithmetic, dtype: torch.dtype, *, on_grid: bool) -> Draw:
        """What an arithmetic does to the place, in the checking decoder."""
        exact = self._plain.at(place, step, Pass(EXACT, dtype, on_grid))
        other = self._plain.at(place, step, Pass(low, dtype, on_grid))
        assert exact is not None
        assert other is not None
        floor = measure(exact, other).relative
        return Draw(max(floor, self._least) if low is FINER else floor, exact, other)

    def _ties(self, step: int, place: str) -> float:
        """What the closest call of every row does, and every exact tie, decided otherwise."""
        exact = self._plain.at(place, step, self._exact(on_grid=False))
        flipped = self._plain.at(place, step, Pass(replace(EXACT, flips=True), self.dtype))
        assert exact is not None
        assert flipped is not None
        return measure(exact, flipped).relative

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
