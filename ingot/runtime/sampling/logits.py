"""Logits processors that come with a request.

Owns the call of a function that is not ours (``SamplingParams.logits_processors``), and the error when it
does not keep to its contract. Ingot's own rules are ``penalize``'s. Knows no scheduler, model or text.

    apply_brought(params.logits_processors, [*prompt_ids, *output_ids], logits[row])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ingot.errors import RequestError

Processor = Callable[[list[int], torch.Tensor], torch.Tensor]


def apply_brought(processors: Sequence[Processor], ids: Sequence[int], logits: torch.Tensor) -> None:
    """Put what the functions make of ``logits`` ([V] float32, a view of one row), one after another, in their
    place; ``ids`` are the prompt's and the output's.

    Raises:
        RequestError: a function fails, or returns no logits of that shape.
    """
    for processor in processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        try:
            found = processor(list(ids), logits)
        except Exception as error:
            raise RequestError(
                f"the logits processor {name} failed", seen=repr(error), field="logits_processors"
            ) from error
        if not isinstance(found, torch.Tensor) or found.shape != logits.shape:
            seen = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise RequestError(
                f"the logits processor {name} did not return logits",
                seen=seen,
                allowed=f"a tensor {list(logits.shape)}",
                field="logits_processors",
            )
        if found is not logits:
            logits.copy_(found)
