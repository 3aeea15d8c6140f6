"""What a step computes on its way, copied for a check, and the names of the places (observer.py). A fused
kernel shows nothing of values that it holds in registers.

    record = StepRecord(); ...; record.values["stream"][2 * index]   # the input of layer ``index``

| name | what | how many |
|---|---|---|
| stream | hidden states: embedded, then after each attention, cross-attention, MLP | 2 or 3 per layer + 1 |
| attn_in, mlp_in | the norms' output, input of the QKV and up products | one per layer, or none |
| query | queries [T, num_heads, head_dim] as attention takes them | one per layer |
| attended, inner | input of the output and down products | one per layer, or none |
| cross_in, cross_query, cross_attended | the same of cross-attention | as of attention |

An encoder's layers show the same, and also ``keys`` and ``values`` as attention takes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.layers.observer import Observed

Recorded = torch.Tensor | Int8Rows


@dataclass
class StepRecord:
    """Copies of one step's values.

    Attributes:
        values: by name, in the order of the layers; quantized ones stay ``Int8Rows``.
        cached: per layer what its cache holds of the step's tokens: keys and values [T, num_kv_heads,
            head_dim], and in 8 bits the scales [T, num_kv_heads] of both.
        inputs: the step's tensors by their names in ``ForwardBatch``.
        logits: [L, vocab_size].
    """

    values: dict[str, list[Recorded]] = field(default_factory=lambda: defaultdict(list))
    cached: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None

    def see(self, name: str, value: Observed) -> None:
        """Keep a copy."""
        self.values[name].append(copied(value, None))

    def close(
        self,
        inputs: Mapping[str, torch.Tensor],
        caches: Sequence[tuple[torch.Tensor, ...]],
        logits: torch.Tensor,
    ) -> None:
        """Keep the step's inputs, what it wrote to ``caches`` (tensors per ``LayerCache``), and its
        logits.
        """
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        slots = self.inputs["slot_mapping"].clamp(min=0)
        for tensors in caches:
            size = tensors[0].shape[2]  # tokens per block
            self.cached.append(tuple(tensor[slots // size, :, slots % size] for tensor in tensors))
        self.logits = logits.clone()

    def on_host(self) -> StepRecord:
        """The same on the CPU; a graph's next replay overwrites its own record."""
        assert self.logits is not None
        host = torch.device("cpu")
        return StepRecord(
            {name: [copied(value, host) for value in values] for name, values in self.values.items()},
            [tuple(tensor.to(host, copy=True) for tensor in tensors) for tensors in self.cached],
            {name: tensor.to(host, copy=True) for name, tensor in self.inputs.items()},
            self.logits.to(host, copy=True),
        )


def copied(value: Observed, device: torch.device | None) -> Recorded:
    """A copy on ``device`` (None: where it is), columns in natural order."""
    if isinstance(value, OperandRows):
        value = value.natural()
    if isinstance(value, Int8Rows):
        values, scales = (t.to(device or t.device, copy=True) for t in (value.values, value.scales))
        return Int8Rows(values, scales, value.group)
    return value.to(device or value.device, copy=True)
