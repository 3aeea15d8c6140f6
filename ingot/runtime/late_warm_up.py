"""A warm-up whose larger part follows while no request is in flight.

late = begin_warm_up(executor, plan)  # from here on requests may come
while late.left:
    late.do_part()  # one capture; not while requests are in flight
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ingot.config.kernel_plan import KernelPlan
from ingot.config.modality import TEXT
from ingot.config.step_sizes import draw_kinds
from ingot.device import on_device
from ingot.kernels.built_ahead import noted_folders
from ingot.kernels.kept_kernels import StartNote
from ingot.memory.memory_error import ran_out
from ingot.runtime.executor import Executor
from ingot.runtime.rehearsal import prompt_rehearsals, warm_up
from ingot.runtime.step.graphs import DecodeGraphs
from ingot.runtime.step.prompt_graphs import PromptGraphs
from ingot.runtime.step.runner import Runner

_log = logging.getLogger(__name__)
Part = Callable[[], None]


class LateWarmUp:
    """What is left of a warm-up. Until it is done, graphs of larger sizes stand in for those that are
    missing, or a step's kernels are launched one by one.
    """

    def __init__(self, runner: Runner, parts: Iterable[Part]) -> None:
        self._runner = runner
        self._parts = deque(parts)

    @property
    def left(self) -> int:
        """Number of parts."""
        return len(self._parts)

    def do_part(self) -> None:
        """Do the next part, if one is left; nothing may be in flight. Without memory for it the others are
        left out: the process goes on with the graphs that it has, and logs a warning.
        """
        if not self._parts:
            return
        part = self._parts.popleft()
        try:
            with on_device(self._runner.device):
                part()
        except Exception as error:
            if not ran_out(error):
                raise
            _log.warning("no memory for %d more CUDA graphs: some steps will be slower", len(self._parts) + 1)
            self._parts.clear()
            _set(self._runner, full=True)
        if not self._parts:
            _set(self._runner, standing_in=False)


def begin_warm_up(executor: Executor, plan: KernelPlan) -> LateWarmUp:
    """Do what the first requests need of ``warm_up``: graphs of some batch sizes, and one prompt. All of it,
    and nothing is left, for a model with an encoder, and where no start of the same engine has built its
    kernels yet or some of them were removed since.
    """
    runner, setting, inputs = executor.runner, executor.setting, executor.admission.inputs
    if inputs is not None or setting is None or runner.graphs is None or runner.prompts is None:
        warm_up(executor)
        return LateWarmUp(runner, ())
    card = f"{torch.cuda.get_device_name(runner.device)} {torch.cuda.get_device_capability(runner.device)}"
    note = StartNote(card, json.dumps([setting.to_json(), plan.to_json()], sort_keys=True))
    if not note.exists():
        warm_up(executor)
        note.write(noted_folders())
        return LateWarmUp(runner, ())
    now, later = decode_parts(runner.graphs, executor.max_batch_size, draw_kinds(TEXT))
    with on_device(runner.device):
        for part in now:
            part()
        _set(runner, standing_in=True)
        prompt_rehearsals(executor)[0]()
    prompts = prompt_parts(runner.prompts, executor.max_batch_size, runner.most_tokens)
    chunks = [] if runner.layered is None else runner.layered.warm_up_parts()
    return LateWarmUp(runner, (*prompts, *later, *chunks))


def decode_parts(graphs: DecodeGraphs, most: int, kinds: Sequence[str]) -> tuple[list[Part], list[Part]]:
    """Captures of the batch sizes 1, 4, 16, 64, 256 and the largest, which hold all others; and of these."""
    sizes = [size for size in graphs.buckets if size <= graphs.bucket_of(most)]
    coarse = [size for size in sizes if size in (1, 4, 16, 64, 256, sizes[-1])]
    now: list[Part] = [partial(graphs.warm_up, size, kinds) for size in coarse]
    fine = [size for size in sizes if size not in coarse]
    return now, [partial(graphs.warm_up, size, some) for size in fine for some in (kinds[:1], kinds)]


def prompt_parts(graphs: PromptGraphs, most_requests: int, most_tokens: int) -> list[Part]:
    """Captures of every bucket: first those of most requests, which stand in for the others."""
    sizes = sorted(graphs.sizes(most_requests, most_tokens), key=lambda size: (-size[1], size[0]))
    return [partial(graphs.capture, size) for size in sizes]


def _set(runner: Runner, **values: bool) -> None:
    for graphs in (runner.graphs, runner.prompts):
        for name, value in values.items():
            setattr(graphs, name, value)
