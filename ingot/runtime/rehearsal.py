"""Dummy requests for warm-up: kernels are built, matrix algorithms chosen, graphs captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ingot.config.modality import TEXT
from ingot.config.sampling_params import SamplingParams
from ingot.config.step_sizes import ENCODED_AT_ONCE, TOKEN_BUCKETS, draw_kinds
from ingot.device import on_device
from ingot.errors import RequestError
from ingot.runtime.executor import Executor
from ingot.runtime.scheduling.inputs import RequestInput

_NEW_TOKENS = 4


def warm_up(
    executor: Executor, batch_sizes: Iterable[int] | None = None, kinds: Iterable[str] | None = None
) -> None:
    """Capture graphs for these batch sizes and kinds of sampling (None: all) and, when nothing is in flight,
    run dummy prompts of many lengths. Does nothing on a CPU.

    Raises:
        RequestError: a size that is not 1 to ``max_batch_size``, or an unknown kind.
    """
    runner, inputs = executor.runner, executor.admission.inputs
    sizes = checked_sizes(batch_sizes, executor.max_batch_size)
    known = checked_kinds(kinds, draw_kinds(TEXT if inputs is None else inputs.model.modality))
    if runner.device.type != "cuda":
        return
    with on_device(runner.device):
        runner.warm_up(sizes, known)
    if not executor.has_work:
        rehearse(executor)


def checked_sizes(batch_sizes: Iterable[int] | None, most: int) -> list[int]:
    """Batch sizes to warm up; None: all up to ``most``.

    Raises:
        RequestError: one is not 1 to ``most``.
    """
    sizes = list(range(1, most + 1) if batch_sizes is None else batch_sizes)
    if any(not 1 <= size <= most for size in sizes):
        raise RequestError("unsupported batch size", seen=sizes, allowed=f"1 to {most}", fix="batch_sizes")
    return sizes


def checked_kinds(kinds: Iterable[str] | None, known: Sequence[str]) -> list[str]:
    """Kinds of sampling to warm up; None: all that the model has.

    Raises:
        RequestError: one is not ``known``.
    """
    found = list(known if kinds is None else kinds)
    if not set(found) <= set(known):
        raise RequestError("unknown kind of sampling", seen=found, allowed=", ".join(known), fix="kinds")
    return found


def rehearse(executor: Executor) -> None:
    """Run dummy prompts of many lengths, first each alone, then beside decodes; nothing may be in flight.
    Those of speech have an input, and as many as are encoded together come first.
    """
    *alone, beside_decodes = prompt_rehearsals(executor)
    _without_traces(_encoded_together, executor)
    for part in alone:
        part()
    _without_traces(_wide_step, executor)
    beside_decodes()


def prompt_rehearsals(executor: Executor) -> list[Callable[[], None]]:
    """Parts of ``rehearse``: dummy prompts of many lengths each alone, the shortest first, and at last all
    beside decodes. Nothing may be in flight when one is called, and nothing is afterwards.
    """
    longest = min(executor.scheduler.token_budget, executor.max_seq_len - 1)
    lengths = sorted({min(size, longest) for size in TOKEN_BUCKETS})
    parts: list[Callable[[Executor], None]] = [partial(_alone, length) for length in lengths]
    return [partial(_without_traces, part, executor) for part in (*parts, _beside_decodes)]


def _without_traces(part: Callable[[Executor], None], executor: Executor) -> None:
    """Run a part; no request finds what its prompts left in the cache, and counts are as before."""
    reuse, preemptions = executor.blocks.prefix_reuse, executor.num_preemptions
    executor.blocks.prefix_reuse = False
    try:
        part(executor)
    finally:
        executor.blocks.prefix_reuse, executor.num_preemptions = reuse, preemptions


def _encoded_together(executor: Executor) -> None:
    if _inputs(executor, 0.0):  # most first: graphs of fewer inputs take their memory from those of more
        for power in reversed(range(ENCODED_AT_ONCE.bit_length())):
            for index in range(min(2**power, executor.max_batch_size)):
                _add(executor, 1, 1, value=2**power + index)  # all differ
            _drain(executor)


def _alone(length: int, executor: Executor) -> None:
    _add(executor, length, 1)
    _drain(executor)


def _beside_decodes(executor: Executor) -> None:
    longest = min(executor.scheduler.token_budget, executor.max_seq_len - _NEW_TOKENS)
    for length in sorted({min(2**power, longest) for power in range(max(longest, 0).bit_length() + 1)}):
        if length > 0:
            _add(executor, length, _NEW_TOKENS)
            executor.step()
    _drain(executor)


def _wide_step(executor: Executor) -> None:
    """As many prompts as fill a wide step, if it has more tokens than others and the cache holds them."""
    left = executor.scheduler.prompt_budget
    if left <= executor.scheduler.token_budget:
        return
    for index in range(executor.max_batch_size):
        length = min(left, executor.max_seq_len - 1)
        if length > 0:
            _add(executor, length, 1, value=float(index))
        left -= length
    _drain(executor)


def _inputs(executor: Executor, value: float) -> list[RequestInput]:
    """What a request to a speech model carries; nothing for others."""
    rules = executor.admission.inputs
    blank = None if rules is None or rules.model.modality.takes_text else rules.blank(value)
    return [] if blank is None else [blank]


def _add(executor: Executor, length: int, new_tokens: int, value: float = 0.0) -> None:
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, temperature=0.0)
    name = f"rehearsal of {length} and {new_tokens} at {value}"
    executor.add(name, [0] * length, params, _inputs(executor, value))


def _drain(executor: Executor) -> None:
    while executor.has_work:
        executor.step()
