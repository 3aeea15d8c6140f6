"""Bugs that live in code: one wrong function while a command runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from ingot.kernels.cache.qkv_placement import Placement
from ingot.layers import attention
from ingot.quant.methods import rounding
from ingot.quant.schemes import scheme_registry
from ingot.runtime.sampling import sampler
from ingot.runtime.sampling.grammar_masks import GrammarMasks
from ingot.text.tokenizer.tokenizer_base import Tokenizer
from ingot.text.tokenizer.tokenizer_tiktoken import TiktokenTokenizer

Function = Callable[..., Any]


@contextmanager
def _wrong(place: Any, name: str, of: Callable[[Function], Function]) -> Iterator[None]:
    with patch.object(place, name, of(getattr(place, name))):
        yield


def one_scale_per_block() -> Any:
    """A new token's scale replaces those of its block; the older values are not rounded again."""

    def of(right: Function) -> Function:
        def wrong(qkv: Any, place: Placement, *rest: Any) -> Any:
            query = right(qkv, place, *rest)
            scales = place.cache.scales
            assert scales is not None
            size = place.cache.block_size
            for slot in place.tokens.slot_mapping.tolist():
                if slot % size > 0:
                    for own in scales.tensors:
                        own[slot // size, :, : slot % size] = own[slot // size, :, slot % size, None]
            return query

        return wrong

    return _wrong(attention, "rope_kv_write", of)


def space_before() -> Any:
    """An upgraded library puts a space before a text, which the older one did not."""

    def of(right: Function) -> Function:
        def wrong(self: Tokenizer, text: str, *, first: bool) -> list[int]:
            return list(right(self, f" {text}" if first else text, first=first))

        return wrong

    return _wrong(TiktokenTokenizer, "_encode_text", of)


def grammar_waits_for_thoughts() -> Any:
    """The grammar begins after </think> in the answer, but the prompt has closed the block already."""

    def of(right: Function) -> Function:
        def wrong(self: GrammarMasks, requests: Sequence[Any]) -> list[int]:
            return [-1] * len(right(self, requests))

        return wrong

    return _wrong(GrammarMasks, "place", of)


def draft_unchecked() -> Any:
    """A step ahead takes a draft for the token: now and then the one before it, unchecked."""
    steps: list[torch.Tensor] = []

    def of(right: Function) -> Function:
        def wrong(logits: torch.Tensor) -> Any:
            ids, values = right(logits)
            steps.append(ids)
            if len(steps) % 3 == 0 and len(steps[-2]) == len(ids):
                ids = steps[-2]
            return ids, values

        return wrong

    return _wrong(sampler, "greedy_reference", of)


def sums_by_rows() -> Any:
    """A product that splits its sum in two where a step has more than one row."""

    def of(right: Function) -> Function:
        def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if len(x) < 2:
                return right(x, weight, bias)
            half = x.shape[1] // 2
            first = right(x[:, :half].contiguous(), weight[:, :half].contiguous(), bias)
            return first + right(x[:, half:].contiguous(), weight[:, half:].contiguous(), None)

        return wrong

    return _wrong(scheme_registry, "invariant_linear", of)


def begin_added_again() -> Any:
    """The tokenizer adds BOS to a prompt whose chat template has written it."""

    def of(right: Function) -> Function:
        def wrong(self: Tokenizer, parts: Sequence[str | int]) -> list[int]:
            return [*self.prefix_ids, *right(self, parts)]

        return wrong

    return _wrong(Tokenizer, "encode_parts", of)


def zeros_off_by_one() -> Any:
    """Zero points are written less one, as in the first GPTQ files, and read as they are."""

    def of(right: Function) -> Function:
        def wrong(*args: Any, **named: Any) -> Any:
            found = right(*args, **named)
            assert found.zeros is not None
            less = (found.zeros.int() - 1).clamp(min=0)
            return replace(found, zeros=less.to(found.zeros.dtype))

        return wrong

    return _wrong(rounding, "as_quantized", of)


def times_may_fall() -> Any:
    """The rule of timestamps has the wrong sign: it rules out the later ones, not the earlier ones."""

    def of(right: Function) -> Function:
        def wrong(logits: torch.Tensor, tables: Any, rows: Any, *rest: Any) -> torch.Tensor:
            bent, first = logits.clone(), int(tables.bounds[0, 0])
            for row, last in enumerate(rows.last_times.tolist()):
                if last >= first:
                    bent[row, last:] = -torch.inf
            none = torch.full_like(rows.last_times, -1)
            return right(bent, tables, rows._replace(last_times=none), *rest)  # type: ignore[no-any-return]

        return wrong

    return _wrong(sampler, "hold_transcripts", of)
