"""Embeddings that a request brings, as rows that stand in its prompt in place of tokens."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import torch

from ingot.device import dtype_name
from ingot.errors import RequestError
from ingot.layers.decoder import Decoder
from ingot.layers.forward_batch import Spliced
from ingot.quant.methods.hadamard import rotate
from ingot.runtime.scheduling.inputs import Content, RequestInput
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch

PLACEHOLDER = 0  # the id that stands in the prompt for a row; every vocabulary has it
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class RowRules:
    """Which rows a model takes.

    Attributes:
        dtype: of the hidden states.
        rotated: whether the hidden states are rotated, as in ``w4a8``: rows are then rotated, too.
        taken: False for a model without text in its prompts.
    """

    hidden_size: int
    dtype: torch.dtype
    rotated: bool
    taken: bool

    @classmethod
    def of(cls, model: Decoder) -> Self:
        config = model.config
        return cls(config.hidden_size, model.dtype, bool(model.quant.rotation), config.modality.takes_text)

    def read(self, values: object, place: int) -> RequestInput:
        """Rows from a tensor or array of floats [tokens, hidden_size]; they are copied and hashed on another
        thread.

        Raises:
            RequestError: the model takes none, or they have another type or shape. Values are checked when
                the request is.
        """
        if not self.taken:
            what = "embeddings need a model of text"
            raise RequestError(what, seen="a model of speech", fix="leave them out")
        try:
            tensor = torch.as_tensor(values).detach()
            tensor = (tensor if tensor.layout == torch.strided else tensor.to_dense()).to("cpu", copy=True)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(
                "embeddings must be a tensor or array of floats", seen=error, fix="the embeddings"
            ) from None
        if tensor.dtype not in _FLOATS:
            seen, allowed = str(tensor.dtype), "float16, bfloat16, float32 or float64"
            raise RequestError(
                "embeddings must be of floats", seen=seen, allowed=allowed, fix="the embeddings' dtype"
            )
        if tensor.dim() != 2 or not len(tensor) or tensor.shape[1] != self.hidden_size:
            raise RequestError(
                "embeddings must be rows of the model's hidden size",
                seen=list(tensor.shape),
                allowed=f"[at least 1, {self.hidden_size}]",
                fix="the embeddings: one row for each place in the prompt",
            )
        content = _threads(os.getpid()).submit(self._content, tensor.to(torch.float32))
        return RequestInput(content, len(tensor), place, tokens=len(tensor), encodes=False)

    def _content(self, given: torch.Tensor) -> Content:
        digest = hashlib.blake2b(repr(("rows", *given.shape)).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(given.numpy()).data)
        rows = (rotate(given) if self.rotated else given).to(self.dtype)
        odd = given.numel() - int(rows.isfinite().sum())
        if odd:
            raise RequestError(
                "embeddings have values that are not finite in the engine's dtype",
                seen=f"{odd} of {given.numel()} are NaN, infinite or too large",
                allowed=f"up to {torch.finfo(self.dtype).max:.3g} in {dtype_name(self.dtype)}",
                fix="the embeddings",
            )
        return Content(rows, digest.digest())


def rows_of(step: ScheduledBatch, spliced: Spliced | None, device: torch.device) -> Spliced | None:
    """The rows that a step's requests bring, over what is ``spliced`` already."""
    layout = step.layout
    if not layout.inputs.brought:
        return spliced
    slots, parts, count = np.full(layout.num_tokens, -1, dtype=np.int64), [], 0
    for index, number, start, end in layout.inputs.brought:
        item = step.requests[index]
        given, first = item.request.inputs[number], layout.query_start[index] + start - item.start
        slots[first : first + end - start] = np.arange(count, count + end - start)
        parts.append(given.features[start - given.place : end - given.place])
        count += end - start
    table, places = torch.cat(parts), torch.from_numpy(slots)
    if device.type == "cuda":
        table, places = table.pin_memory(), places.pin_memory()
    return Spliced(places.to(device, non_blocking=True), table.to(device, non_blocking=True), spliced)


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Of this process: a fork lacks those of the other."""
    return ThreadPoolExecutor(2, "ingot-rows")
