"""Which tiles win: compiled ahead, right, and in a faster step.

A kernel's speed depends on its neighbours, so candidates are compared by the time of a whole step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from triton.errors import TritonError

from ingot.building.tuner.kernel_timing import GraphTimer
from ingot.building.tuner.trial_plan import PlanPlace, using
from ingot.building.tuner.tuned_steps import StepKind, Steps
from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import row_bucket
from ingot.config.runtime_config import RuntimeConfig
from ingot.control_groups import usable_processors
from ingot.device import on_device
from ingot.errors import DeviceError
from ingot.kernels.activation import gated_mlp
from ingot.kernels.attention import paged_attention
from ingot.kernels.cache import rope_kv_write
from ingot.kernels.norm import layer_norm, rms_norm
from ingot.kernels.tiles import prefill_tiles, product_tiles
from ingot.kernels.weight.stored_weight import stored
from ingot.memory.memory_sizes import encoded_at_once

MARGIN = 0.003  # by which a step must be faster than with the default: less is noise
PROMPTS = (512, 2048)  # tokens of the prompts that are measured
MOST_REQUESTS = 64  # of the decode steps that are measured
CAPTURES = 3  # of the same step: where a graph's buffers lie moves its time, by 0.3 % on an H200
ROUNDS = 15  # replays of a step with the default and with a candidate, in turn
MOST_THREADS = 16
# What a candidate may raise: tiles that Triton cannot compile or the GPU cannot launch.
CANDIDATE_ERRORS = (TritonError, RuntimeError, ValueError)
# Distance from the default's result, in units of |result| + its root mean square: another order of sums.
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}
Tiles = dict[str, int]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TileChoice:
    """The tiles of one op and key; ``tiles`` is None where the default stays. Times are of a step of a few
    layers, with the default and with the tiles.
    """

    place: PlanPlace
    tiles: Tiles | None
    default_us: float
    best_us: float


@dataclass(frozen=True)
class Dropped:
    """A candidate that did not take part, and why."""

    place: PlanPlace
    tiles: Tiles
    reason: str


def measured_steps(limits: BuildConfig) -> list[StepKind]:
    """The steps that are measured: decodes of the most requests of every bucket, and prompts."""
    most = min(limits.max_batch_size, MOST_REQUESTS)
    batches = sorted({min(row_bucket(rows), most) for rows in range(1, most + 1)})
    longest = min(limits.max_seq_len, RuntimeConfig().token_budget)
    prompts = sorted({min(tokens, longest) for tokens in PROMPTS})
    return [*(StepKind(True, rows) for rows in batches), *(StepKind(False, tokens) for tokens in prompts)]


def encoder_steps(config: DecoderConfig, limits: BuildConfig) -> list[StepKind]:
    """The encoding of the longest inputs, as the runtime does it on a GPU: 1, 2, 4 … at once."""
    if config.encoder is None:
        return []
    inputs_at_once = encoded_at_once(config.encoder, RuntimeConfig(), on_gpu=True)
    counts = [1 << power for power in range(min(inputs_at_once, limits.max_batch_size).bit_length())]
    return [StepKind(False, count * config.encoder.max_positions, encodes=True) for count in counts]


def candidates(
    op: str, shape: Mapping[str, int], rows: int, dtype: torch.dtype, device: torch.device
) -> list[Tiles]:
    """Tiles of an op of the plan for a shape and a number of rows, the default first."""
    size = dtype.itemsize
    if op.startswith("small_"):
        weight = stored(torch.empty(shape["n"], shape["k"], dtype=dtype, device="meta"))
        return product_tiles.candidate_tiles(rows, weight, size, device)
    if op == "paged_attention":
        heads = (shape["kv"], shape["q"] // shape["kv"], shape["d"])
        return paged_attention.candidate_tiles(*heads, size, device, rows)
    if op == "prefill_attention":
        return prefill_tiles.candidate_tiles(rows, shape["d"], size, device)
    if op in ("rms_norm", "layer_norm"):
        norm = rms_norm if op == "rms_norm" else layer_norm
        return norm.candidate_tiles(shape["h"], device)
    return (gated_mlp if op == "silu_mul" else rope_kv_write).candidate_tiles(device)


@dataclass
class _Entry:
    """A place of the plan, the step that asks for it, and the candidates that are left."""

    place: PlanPlace
    kind: StepKind
    default: Tiles
    others: list[Tiles]


class Search:
    """Decides places one by one, all compiled before; ``dropped``: candidates that failed or were wrong."""

    def __init__(
        self, steps: Steps, device: torch.device, timer: GraphTimer, progress: Progress | None = None
    ) -> None:
        self.dropped: list[Dropped] = []
        self._steps = steps
        self._device = device
        self._timer = timer
        self._progress = progress or (lambda what, done, total: None)
        self._entries: list[_Entry] = []

    def prepare(self, kinds: Iterable[StepKind], ops: Container[str]) -> None:
        """Run every step with the defaults, note what it asks for, and compile all candidates.

        Raises DeviceError where a step does not run with the defaults.
        """
        asked = self._steps.plan.asked
        for kind in kinds:
            before = len(asked)
            reason = _failure(self._steps.step(kind))
            if reason is not None:
                what, seen = "an op's default tiles do not run on this GPU", f"a step of {kind}: {reason}"
                raise DeviceError(what, seen=seen)
            for place, (shape, rows) in list(asked.items())[before:]:
                default, *others = candidates(place.op, shape, rows, self._steps.dtype, self._device)
                if place.op in ops and others:
                    self._entries.append(_Entry(place, kind, default, others))
        self._compile()

    def choices(self) -> list[TileChoice]:
        """Tiles for every place, each decided with what was found for those before it."""
        found: list[TileChoice] = []
        taken: dict[PlanPlace, Tiles] = {}
        for done, entry in enumerate(self._entries):
            self._progress(f"timing {entry.place.op} {entry.place.key}", done, len(self._entries))
            # Drop candidates with which the step computes something else than with the default.
            expected = self._steps.computed(entry.kind)
            for tiles in list(entry.others):
                with using({entry.place: tiles}):
                    if not agrees(self._steps.computed(entry.kind), expected):
                        self._drop(entry, tiles, "its result differs from the default's")
            choice = self._choice(entry, taken)
            found.append(choice)
            if choice.tiles is not None:
                taken[entry.place] = choice.tiles
        return found

    def _compile(self) -> None:
        """Launch every candidate once, on threads: most of a compilation runs outside of Python's lock."""
        threads = min(MOST_THREADS, usable_processors()) if self._device.type == "cuda" else 1
        tries = [(entry, tiles) for entry in self._entries for tiles in entry.others]
        with ThreadPoolExecutor(threads) as pool:
            reasons = pool.map(lambda one: self._launch(*one), tries)
            for done, ((entry, tiles), reason) in enumerate(zip(tries, reasons, strict=True)):
                self._progress(f"compiling {entry.place.op} {entry.place.key}", done, len(tries))
                if reason is not None:
                    self._drop(entry, tiles, reason)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _launch(self, entry: _Entry, tiles: Tiles) -> str | None:
        with torch.inference_mode(), on_device(self._device), using({entry.place: tiles}):
            return _failure(self._steps.step(entry.kind))

    def _drop(self, entry: _Entry, tiles: Tiles, reason: str) -> None:
        entry.others.remove(tiles)
        self.dropped.append(Dropped(entry.place, tiles, reason))

    def _choice(self, entry: _Entry, taken: dict[PlanPlace, Tiles]) -> TileChoice:
        """The candidate with the fastest step, if that is clearly faster than with the default."""
        every = [entry.default, *entry.others]
        times = [self._times(entry, tiles, taken) for tiles in every]
        ratios = [us / default_us for default_us, us in times]
        best = ratios.index(min(ratios))
        default_us, best_us = times[best]
        if best and ratios[best] < 1 - MARGIN:
            return TileChoice(entry.place, every[best], default_us, best_us)
        return TileChoice(entry.place, None, default_us, default_us)

    def _times(self, entry: _Entry, tiles: Tiles, taken: dict[PlanPlace, Tiles]) -> tuple[float, float]:
        """Median microseconds of the step with the default and with ``tiles``, taking turns."""
        clocks = []
        for trial in (entry.default, tiles):
            with using({**taken, entry.place: trial}):
                clocks.append([self._timer.prepare([self._steps.step(entry.kind)]) for _ in range(CAPTURES)])
        rounds = [[statistics.fmean(clock() for clock in side) for side in clocks] for _ in range(ROUNDS)]
        default_us, us = (statistics.median(side) for side in zip(*rounds, strict=True))
        return default_us, us


def _failure(step: Callable[[], object]) -> str | None:
    """Why a step cannot run; None where it does. Errors that its tiles do not cause are raised."""
    try:
        step()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except CANDIDATE_ERRORS as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def agrees(results: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    """Whether results are equal within their dtype's tolerance; NaN equals NaN."""
    for result, wanted in zip(results, expected, strict=True):
        wide = wanted.float()
        scale = wide.abs() + wide.nan_to_num().square().mean().sqrt()
        near = (result.float() - wide).abs() <= TOLERANCES[wanted.dtype] * scale
        if not bool((near | (result.isnan() & wanted.isnan())).all()):
            return False
    return True
