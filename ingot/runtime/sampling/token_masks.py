"""Token masks on the device for the rows of one step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ingot.text.grammar.grammar_compiler import mask_words


class _HostSide(NamedTuple):
    """Masks on the host, and the event after which they may be written again."""

    masks: torch.Tensor
    sent: torch.cuda.Event | None


class TokenMasks:
    """Room for the masks of ``max_rows`` rows."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._shape = (max_rows, mask_words(vocab_size))
        self._device = device
        self._turn = 0

    @cached_property
    def table(self) -> torch.Tensor:
        """[max_rows, ceil(V / 32)] int32; made when first asked for, and at one address from then on, since
        graphs hold it.
        """
        with torch.inference_mode(mode=False):  # it outlives the step that asks first
            return torch.zeros(self._shape, dtype=torch.int32, device=self._device)

    def send(self, masks: Sequence[npt.NDArray[np.int32]]) -> None:
        """Make them the first rows of the table for the steps that are sent from now on."""
        if not masks:
            return
        self._turn = 1 - self._turn
        side = self._sides[self._turn]
        if side.sent is not None:
            side.sent.synchronize()
        np.stack(masks, out=side.masks.numpy()[: len(masks)])
        self.table[: len(masks)].copy_(side.masks[: len(masks)], non_blocking=True)
        if side.sent is not None:
            side.sent.record()

    @cached_property
    def _sides(self) -> list[_HostSide]:
        on_gpu = self._device.type == "cuda"
        return [
            _HostSide(
                torch.zeros(self._shape, dtype=torch.int32, pin_memory=on_gpu),
                torch.cuda.Event() if on_gpu else None,
            )
            for _ in range(2)
        ]
