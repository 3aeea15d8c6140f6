"""A second witness of attention: the same operands in fp64.

Kernels and twins round each key's weight to the dtype before they multiply it by a value, in other places of
the same sum, and bf16 has hardly more digits than a number of 8 bits: their numbers differ often, and both
are right. So an output is held to fp64 instead, within what these roundings can do, value by value and on the
average, where they cancel; and numbers of 8 bits are exactly those of the output by the rule. Owns these
bounds; knows no walk.
"""

from __future__ import annotations

import torch

from ingot.kernels.attention.attention_arguments import Scoring, Sequences
from ingot.kernels.attention.int8_heads import OutScales, put_heads, scales_at
from ingot.kernels.attention.paged_attention import paged_attention_reference
from ingot.kernels.attention.prefill_reference import prefill_attention_reference
from ingot.kernels.cache.paged_cache import PagedCache

ATTENTION = {
    "paged_attention": paged_attention_reference,
    "prefill_attention": prefill_attention_reference,
}
# Half a last place of the dtype; of fp32, whose weights are not rounded again, the error of long sums.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SUM = 2.0**-17
LEAST = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}  # what rounding makes 0
MEAN = 0.25  # of UNIT, the share of an output that all of an op's calls may be too large or too small by


class AttentionWitness:
    """Judges the calls of one op.

    Args:
        op: its name, one of ``ATTENTION``.
        dtype: of queries and outputs.
    """

    def __init__(self, op: str, dtype: torch.dtype) -> None:
        self.op, self.dtype = op, dtype
        self.errors = self.sizes = 0.0  # Σ (output - exact) · exact, Σ exact²
        self._wrong: list[str] = []

    def see(
        self,
        args: tuple[torch.Tensor, PagedCache, Sequences, Scoring],
        wide: torch.Tensor,
        result: torch.Tensor,
        out_scales: OutScales | None,
    ) -> None:
        """Judge a call by its operands, its output [T, heads, head_dim] in the dtype, and what it gave."""
        own = slice(None)
        if (start := args[2].query_start) is not None:
            own = slice(int(start[0]), int(start[-1]))
        exact, reach = self._exact(*args)
        exact, reach, found = exact[own], reach[own], wide[own].double()
        over = (found - exact).abs() - reach
        if not bool((over <= 0).all()):  # so that NaN fails
            at = int(over.nan_to_num(nan=torch.inf).flatten().argmax())
            values = float(found.flatten()[at]), float(exact.flatten()[at])
            self._wrong.append(f"{self.op}: {values[0]} where fp64 has {values[1]}")
        self.errors += float(((found - exact) * exact).sum())
        self.sizes += float(exact.square().sum())
        if out_scales is None:
            same = torch.equal(result[own], wide[own])
        else:
            scales = scales_at(out_scales, own)
            numbers = torch.empty(wide[own].shape, dtype=torch.int8)
            reported = (
                torch.empty_like(scales) if isinstance(scales, torch.Tensor) and scales.dim() > 1 else scales
            )
            put_heads(wide[own], numbers, reported)
            same = torch.equal(result[own], numbers)
            if isinstance(scales, torch.Tensor) and isinstance(reported, torch.Tensor):
                same = same and torch.equal(scales, reported)
        if not same:
            self._wrong.append(f"{self.op}: other numbers than its own output's")

    def _exact(
        self, query: torch.Tensor, cache: PagedCache, sequences: Sequences, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output in fp64, and how far one in the dtype may be from it: by half a last place of its own,
        and of each value's part of the sum.
        """
        scales, reference = cache.scales, ATTENTION[self.op]
        wide = cache.keys.double() if scales is None else cache.keys
        values = cache.values.double() if scales is None else cache.values
        exact, size = (
            reference(query.double(), PagedCache(wide, v, scales), sequences, scoring)
            for v in (values, values.abs())
        )
        unit = UNIT[self.dtype]
        weights = 0.0 if self.dtype == torch.float32 else unit
        most = values.abs().double().amax() * (1.0 if scales is None else scales.values.amax().double())
        lost = LEAST[self.dtype] * (1 + int(sequences.seq_lens.max()) * float(most))
        return exact, (weights + SUM) * size + unit * exact.abs() + lost

    def faults(self) -> list[str]:
        """What differs by more than it may; [] if nothing does."""
        mean = abs(self.errors) / max(self.sizes, 1e-30)
        most = MEAN * UNIT[self.dtype] + SUM
        much = [f"{self.op}: off by {mean:.1e} on the average, {most:.1e} may be"] if mean > most else []
        return self._wrong + much
