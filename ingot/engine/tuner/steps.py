"""Whether a choice makes the decode step faster, and not only the op alone.

Owns a few layers of the model with random weights, run as the runtime runs them, and the decision. Alone, an
op overlaps with itself; in a step, with its neighbours. Knows no op's arguments.

    choices, times = refine(choices, Steps(config, limits, machine, inputs, timer), rows=[1, 8])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.config.build import BuildConfig
from ingot.config.model import DecoderConfig
from ingot.config.plan import KernelPlan, Machine, plan_key
from ingot.config.quant import QuantConfig
from ingot.config.runtime import RuntimeConfig
from ingot.engine.assemble import empty_model, stored_tensors
from ingot.engine.tuner.cases import CONTEXT
from ingot.engine.tuner.inputs import FOOTPRINT, Inputs
from ingot.engine.tuner.search import CAPTURES, Choice, Progress, decide, plan_of, relative, timed
from ingot.engine.tuner.timing import Measure, Timer, averaged
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder
from ingot.layers.forward import Operations
from ingot.layers.ways import Step, Ways
from ingot.models.registry import architecture_named

STEP_MARGIN = 0.003  # by which a step must be faster with a candidate that did not win alone
ROUNDS = 15
LAYERS = 4
HEAD_ROWS = 1024  # of the vocabulary: the head takes as long as some layers, and is timed alone
OPS_OF_A_STEP = ("small_qkv", "paged_attention", "small_linear", "small_gate_up")


@dataclass(frozen=True)
class StepTime:
    """Microseconds of a decode step of ``layers`` layers with default tiles, and with the plan's."""

    rows: int
    layers: int
    default_us: float
    best_us: float


class Steps:
    """Decode steps of a few layers over random weights and caches, under any plan."""

    def __init__(
        self, config: DecoderConfig, limits: BuildConfig, machine: Machine, inputs: Inputs, timer: Timer
    ) -> None:
        vocabulary = min(config.vocab_size, HEAD_ROWS)
        self.head = config.vocab_size
        self.machine = machine
        self.config = config.replace(
            num_layers=min(LAYERS, config.num_layers), vocab_size=vocabulary, tie_word_embeddings=False
        )
        self._limits = limits
        self._inputs = inputs
        self._timer = timer
        self._context = min(CONTEXT, limits.max_seq_len)
        self._weights: dict[str, torch.Tensor] = {}
        self._caches: list[LayerCache] = []

    def clock(self, choices: Sequence[Choice], rows: int) -> Measure:
        """Times steps of ``rows`` requests under the plan of ``choices``; compiles what is not compiled."""
        model = self._empty(plan_of(choices, self.machine))
        if not self._weights:
            self._weights = {n: self._random(tuple(t.shape)) for n, t in stored_tensors(model).items()}
        model.load_state_dict(self._weights, assign=True)
        if model.rotary is not None:
            model.rotary.to(self._inputs.device)
        hidden, batch, caches = self._inputs.normal(rows, self.config.hidden_size), *self._step(rows)
        operations = Operations(model, Ways(model, caches), Step(decodes=True, rows=len(hidden)))
        operations.logits(hidden, batch, caches)
        step = lambda: operations.logits(hidden, batch, caches)  # noqa: E731
        return averaged(self._timer, [step], CAPTURES)

    def _empty(self, plan: KernelPlan) -> Decoder:
        architecture = architecture_named(self.config.architecture)
        return empty_model(architecture, self.config, self._limits, QuantConfig(), plan)

    def _new_caches(self, blocks: int, block_size: int) -> list[LayerCache]:
        """Random keys and values of every layer; large ones are shared, for no L2 cache holds them."""
        shape = (blocks, self.config.num_kv_heads, block_size, self.config.head_dim)
        num_bytes = 2 * math.prod(shape) * self._inputs.dtype.itemsize
        count = min(-(-FOOTPRINT // num_bytes), self.config.num_layers)
        distinct = [
            LayerCache(self._inputs.normal(*shape), self._inputs.normal(*shape)) for _ in range(count)
        ]
        return [distinct[layer % count] for layer in range(self.config.num_layers)]

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A weight of std 0.02, or a norm's or bias's near 1."""
        values = self._inputs.normal(*shape).mul_(0.02)
        return values if len(shape) > 1 else values.add_(1)

    def _step(self, rows: int) -> tuple[ForwardBatch, list[LayerCache]]:
        """A step in which each of ``rows`` requests computes the last token of its context."""
        block_size = RuntimeConfig().block_size
        blocks = -(-self._context // block_size)
        if not self._caches or self._caches[0].keys.shape[0] < rows * blocks:
            self._caches = self._new_caches(rows * blocks, block_size)
        index = self._inputs.index
        last = self._context - 1
        tables = torch.arange(rows * blocks).view(rows, blocks)
        positions = index(torch.full((rows,), last))
        batch = ForwardBatch(
            input_ids=positions,
            positions=positions,
            rope_rows=positions,
            slot_mapping=index(tables[:, -1] * block_size + last % block_size),
            block_tables=index(tables, torch.int32),
            query_start=index(torch.arange(rows + 1), torch.int32),
            seq_lens=index(torch.full((rows,), self._context), torch.int32),
            logits_indices=index(torch.arange(rows)),
            max_query_len=1,
            max_seq_len=self._limits.max_seq_len,
            arrivals=index(torch.zeros(rows * self._caches[0].num_kv_heads), torch.int32),
        )
        return batch, self._caches


def refine(
    choices: Sequence[Choice], steps: Steps, rows: Sequence[int], progress: Progress | None = None
) -> tuple[list[Choice], list[StepTime]]:
    """Choices that make steps of ``rows`` requests faster, one op after the other; and what they bring.

    Of an op's default and finalists the one with the fastest step is taken, the other ops being what was
    found so far. Ops that no such step has keep what was found for them alone. No times where nothing
    changes.
    """
    found = [choice.taking(None) if _rows_of(choice, steps, rows) else choice for choice in choices]
    start = list(found)
    for place, choice in enumerate(choices):
        counts = _rows_of(choice, steps, rows)
        if not counts or not choice.finalists:
            continue
        if progress is not None:
            progress(f"timing steps with {choice.task.op} {choice.task.key}", place, len(choices))
        options = [choice.taking(None), *(choice.taking(tiles) for tiles, _ in choice.finalists)]
        plans = [[*found[:place], option, *found[place + 1 :]] for option in options]
        times = timed([[steps.clock(plan, count) for count in counts] for plan in plans], ROUNDS)
        handicaps = [0.0 if option.tiles == choice.tiles else STEP_MARGIN for option in options[1:]]
        ratios = [relative(t, times[0]) + h for t, h in zip(times, [0.0, *handicaps], strict=True)]
        found[place] = options[decide(ratios, 0.0)]
    layers = steps.config.num_layers
    brought = []
    for count in rows if found != start else ():
        (before,), (after,) = timed([[steps.clock(start, count)], [steps.clock(found, count)]], ROUNDS)
        brought.append(StepTime(count, layers, before, after))
    return found, brought


def _rows_of(choice: Choice, steps: Steps, rows: Sequence[int]) -> list[int]:
    """Numbers of requests whose steps ask for this choice."""
    task = choice.task
    if task.op not in OPS_OF_A_STEP or task.sizes.get("n") == steps.head:
        return []
    return [count for count in rows if plan_key(task.op, count, task.sizes) == task.key]
