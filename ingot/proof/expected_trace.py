"""A layer's expected output from a trace of ``ingot align`` (keys ``STEP/MODULE``) or a tap's tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ingot.errors import CheckpointError, NoSuchPathError


def expected_output(path: Path, name: str, counts: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """[T, hidden_size]: a layer's hidden states for all tokens that ran, or all positions of an encoder.

    A key names the layer as ``layers.N`` or ``h.N``, with or without a prefix, and ``.output`` behind;
    ``STEP/`` goes before it, or the tensor holds all steps. In keys of an encoder's layers the prefix ends in
    ``encoder``.

    Args:
        name: ``layers.N`` or ``encoder.layers.N``.

    Raises:
        NoSuchPathError: there is no such file.
        CheckpointError: it is no safetensors file, lacks the layer or a token, or is of other tokens.
    """
    if not path.exists():
        raise NoSuchPathError("no such trace", seen=path, field="expected")
    total = sum(counts)
    try:
        with safe_open(path, framework="pt") as file:
            steps = [key for key in file.keys() if re.fullmatch(r"\d+/input_ids", key)]  # noqa: SIM118
            steps.sort(key=lambda key: int(key.split("/")[0]))
            ran = [int(i) for step in steps for i in file.get_tensor(step).flatten()]
            found = [_rows(file.get_tensor(key)) for key in _keys(file, name)]
    except (SafetensorError, OSError) as error:
        raise CheckpointError("the trace cannot be read", seen=f"{path}: {error}", field="expected") from None
    for place, (one, own) in enumerate(zip(ran, tokens[:total], strict=False)):
        if one != own:
            raise CheckpointError(
                "the trace is for different tokens",
                seen=f"token {place} is {one}, the engine's is {own}",
                field="ids",
                fix="`ids` with the trace's tokens",
            )
    rows = torch.cat(found) if found else torch.empty(0, 0)
    if rows.dim() != 2 or rows.shape[0] < total:
        raise CheckpointError(
            f"the trace does not contain {name} for all tokens",
            seen=f"{path}: {len(rows)} tokens",
            allowed=f"{total} tokens, under keys like 0/model.{name}",
            field="expected",
            fix="`expected` with another trace, or a smaller `step`",
        )
    return rows[:total]


def _keys(file: Any, name: str) -> list[str]:
    """The layer's keys in the order of their steps."""
    before, _, index = name.rpartition(".")
    encoder = before.startswith("encoder.")
    prefix = r"(?:\w+\.)*encoder\." if encoder else r"(?:(?!encoder\.)\w+\.)*"
    pattern = re.compile(rf"(?:(\d+)/)?{prefix}(?:layers|h)\.{index}(?:\.output)?")
    matches = [match for key in file.keys() if (match := pattern.fullmatch(key))]  # noqa: SIM118
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1] or 0))]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Hidden states without the leading dimension of one sequence."""
    return tensor[0] if tensor.dim() == 3 and tensor.shape[0] == 1 else tensor
