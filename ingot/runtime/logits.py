"""Decoding rules, each a logits processor.

Owns the rules that change a request's logits before a token is chosen: repetition, presence and frequency
penalties, the minimum length, and those that a request brings. Knows no scheduler, model or text; how a token
is drawn is the sampler's.

    for processor in processors_for(params, prompt_ids, eos_ids, vocab_size, device):
        processor(logits[row], output_ids)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from ingot.config.sampling import SamplingParams
from ingot.errors import RequestError

_FIRST_CAPACITY = 256


class LogitsProcessor(Protocol):
    """One decoding rule of one request."""

    def __call__(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        """Change ``logits`` ([V] float32, a view of one row) in place, given the tokens generated so far.

        State that a processor keeps between calls is a cache: ``output_ids`` alone decides the result, so a
        request that was preempted, or a beam that changed parents, gets what a new processor would give.
        """


def processors_for(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    stop_ids: frozenset[int],
    vocab_size: int,
    device: torch.device | str,
) -> list[LogitsProcessor]:
    """The processors that ``params`` asks for, in the order in which they apply; none that does nothing.

    Args:
        prompt_ids: the prompt's tokens; ids outside the vocabulary (image placeholders) are passed over.
        stop_ids: the engine's own end tokens.
        vocab_size: V, the width of the logits rows.
        device: where the logits live.
    """
    processors: list[LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(params.repetition_penalty, prompt_ids, vocab_size, device))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(CountPenalty(params.presence_penalty, params.frequency_penalty, vocab_size, device))
    end_ids = [t for t in sorted(params.end_ids(stop_ids)) if t < vocab_size]
    if params.min_new_tokens and end_ids and params.grammar is None:  # a grammar has that rule of its own
        processors.append(MinNewTokens(params.min_new_tokens, end_ids, device))
    return [*processors, *(Brought(function, prompt_ids) for function in params.logits_processors)]


class RepetitionPenalty:
    """Every token of prompt and output, once each: a score s < 0 becomes s * penalty, others s / penalty.

    Source: CTRL, https://arxiv.org/abs/1909.05858, with Hugging Face's sign rule.
    """

    def __init__(
        self, penalty: float, prompt_ids: Sequence[int], vocab_size: int, device: torch.device | str
    ) -> None:
        self._penalty = penalty
        self._prompt_ids = list(prompt_ids)
        self._vocab_size = vocab_size
        self._history = _History()
        self._table = _TokenTable(device)
        self._add(self._prompt_ids)

    def __call__(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        """Scale the scores of tokens seen; see the class."""
        restart, fresh = self._history.advance(output_ids)
        if restart:
            self._table.clear()
            self._add(self._prompt_ids)
        self._add(fresh)
        ids, _ = self._table.tensors()
        scores = logits[ids]
        logits[ids] = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)

    def _add(self, token_ids: Iterable[int]) -> None:
        for token in _known(token_ids, self._vocab_size):
            if token not in self._table:
                self._table.put(token, self._penalty)


class CountPenalty:
    """Output token t, generated c > 0 times: its score loses presence + frequency * c.

    Source: the OpenAI API's definition of ``presence_penalty`` and ``frequency_penalty``.
    """

    def __init__(
        self, presence: float, frequency: float, vocab_size: int, device: torch.device | str
    ) -> None:
        self._presence = presence
        self._frequency = frequency
        self._vocab_size = vocab_size
        self._history = _History()
        self._counts: Counter[int] = Counter()
        self._table = _TokenTable(device)

    def __call__(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        """Subtract the penalties of tokens generated; see the class."""
        restart, fresh = self._history.advance(output_ids)
        if restart:
            self._counts.clear()
            self._table.clear()
        for token in _known(fresh, self._vocab_size):
            self._counts[token] += 1
            self._table.put(token, self._presence + self._frequency * self._counts[token])
        ids, penalties = self._table.tensors()
        logits[ids] -= penalties


class MinNewTokens:
    """End tokens are banned until ``minimum`` tokens have been generated."""

    def __init__(self, minimum: int, end_ids: Sequence[int], device: torch.device | str) -> None:
        self._minimum = minimum
        self._end_ids = torch.tensor(list(end_ids), dtype=torch.int64, device=device)

    def __call__(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        """Set the end tokens' scores to -inf while the output is too short."""
        if len(output_ids) < self._minimum:
            logits.index_fill_(0, self._end_ids, float("-inf"))


class Brought:
    """A function (ids, logits) → logits that came with the request (``SamplingParams.logits_processors``)."""

    def __init__(
        self, function: Callable[[list[int], torch.Tensor], torch.Tensor], prompt_ids: Sequence[int]
    ) -> None:
        self._function = function
        self._prompt_ids = prompt_ids

    def __call__(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        """Put what the function returns in the logits' place.

        Raises:
            RequestError: the function fails, or returns no logits of that shape.
        """
        name = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            found = self._function([*self._prompt_ids, *output_ids], logits)
        except Exception as error:
            raise RequestError(
                f"the logits processor {name} failed", seen=repr(error), flag="logits_processors"
            ) from error
        if not isinstance(found, torch.Tensor) or found.shape != logits.shape:
            seen = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise RequestError(
                f"the logits processor {name} did not return logits",
                seen=seen,
                allowed=f"a tensor {list(logits.shape)}",
                flag="logits_processors",
            )
        if found is not logits:
            logits.copy_(found)


class _History:
    """The output tokens that a processor's state stands for."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def advance(self, output_ids: Sequence[int]) -> tuple[bool, list[int]]:
        """(whether the state must start over, tokens to add to it)."""
        known = len(self._ids)
        same = len(output_ids) >= known and list(output_ids[:known]) == self._ids
        fresh = list(output_ids[known:] if same else output_ids)
        if same:
            self._ids.extend(fresh)
        else:
            self._ids = list(fresh)
        return not same, fresh


class _TokenTable:
    """Distinct tokens with a value each, on the host and mirrored on the device.

    The usual step changes one entry, which goes to the device as the argument of a fill: no copy, no wait.
    More entries than that are sent whole. Memory and work grow with the distinct tokens, not the vocabulary.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._slots: dict[int, int] = {}
        self._tokens: list[int] = []
        self._values: list[float] = []
        self._dirty: set[int] = set()
        self._device_ids = torch.zeros(_FIRST_CAPACITY, dtype=torch.int64, device=device)
        self._device_values = torch.zeros(_FIRST_CAPACITY, dtype=torch.float32, device=device)

    def __contains__(self, token: int) -> bool:
        return token in self._slots

    def clear(self) -> None:
        """Forget every token."""
        self._slots.clear()
        self._tokens.clear()
        self._values.clear()
        self._dirty.clear()

    def put(self, token: int, value: float) -> None:
        """Give ``token`` a value; a new token takes the next slot."""
        slot = self._slots.setdefault(token, len(self._tokens))
        if slot == len(self._tokens):
            self._tokens.append(token)
            self._values.append(value)
        else:
            self._values[slot] = value
        self._dirty.add(slot)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """([n] int64 distinct tokens, [n] float32 values) on the device."""
        count = len(self._tokens)
        if len(self._dirty) == 1 and count <= len(self._device_ids):
            slot = next(iter(self._dirty))
            self._device_ids[slot].fill_(self._tokens[slot])
            self._device_values[slot].fill_(self._values[slot])
        elif self._dirty:
            self._send_all(count)
        self._dirty.clear()
        return self._device_ids[:count], self._device_values[:count]

    def _send_all(self, count: int) -> None:
        spare = max(2 * count, _FIRST_CAPACITY) - count
        self._device_ids = torch.tensor(self._tokens + [0] * spare, dtype=torch.int64, device=self._device)
        self._device_values = torch.tensor(
            self._values + [0.0] * spare, dtype=torch.float32, device=self._device
        )


def _known(token_ids: Iterable[int], vocab_size: int) -> Iterator[int]:
    return (t for t in token_ids if 0 <= t < vocab_size)
