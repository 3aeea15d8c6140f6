"""What can be evaluated: Ingot's engines and Hugging Face's classes alike.

Owns the interface between an evaluation and a model, and what an evaluation adds to the description of one.
Knows no metric.

    with open_side(SideSpec(path="engines/pocket-chat")) as side: side.log_likelihood(ids)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ingot.config.modality import EVAL_WER, expect_text
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest, is_engine
from ingot.measure.evaluate.data_item import Item
from ingot.measure.evaluate.eval_prompts import check_same_tokens
from ingot.measure.side.huggingface import check_huggingface
from ingot.measure.side.model_spec import (
    HUGGINGFACE,
    INGOT,
    ModelSpec,
    against_parts,
    longest,
    model_of,
    read_text,
    trained_length,
)


@dataclass(frozen=True)
class SideSpec(ModelSpec):
    """How to open a side.

    Attributes:
        batch: rows of one padded batch, for ``hf``.
        small_cache: take no more memory for the KV cache than one request needs, for two sides at once.
        name: what tables call it.
    """

    path: str = field()
    batch: int = 8
    small_cache: bool = False
    name: str = INGOT


@dataclass(frozen=True)
class Generated:
    """New tokens of one prompt, without an end token."""

    position: int
    token_ids: list[int]
    finish_reason: str


class Side(Protocol):
    """A model that answers greedily and says how likely text is."""

    max_seq_len: int
    vocab_size: int

    def warm_up(self) -> None:
        """Compile and capture what generation needs."""
        ...

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, stop_ids: Sequence[int], stops: Sequence[str]
    ) -> Iterator[Generated]:
        """Greedy answers in the order in which they end. A side may go on after a stop string."""
        ...

    def log_likelihood(self, ids: list[int]) -> torch.Tensor:
        """Log-probability of each token but the first: float32 [num_tokens - 1] on the CPU."""
        ...

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits after each token: float32 [num_tokens, vocab_size] on the CPU."""
        ...

    def facts(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


def other_spec(spec: SideSpec, against: str, dtype: str, batch: int) -> SideSpec:
    """The spec of ``hf``, ``hf:CHECKPOINT``, or an engine or checkpoint, on the same device."""
    is_class, path = against_parts(against)
    plain = spec.replace(dtype=dtype, quant="none", kv_dtype="auto")
    if is_class:
        return plain.replace(path=path or spec.path, kind=HUGGINGFACE, batch=batch, name="huggingface")
    most = None if is_engine(Path(against)) else spec.max_seq_len
    return plain.replace(path=against, max_seq_len=most, name="against" if spec.name == INGOT else INGOT)


def check_side(spec: SideSpec) -> None:
    """Say early what would only fail once this side's turn comes.

    Raises:
        IngotError: nothing is there, or Hugging Face's class cannot read it.
    """
    if spec.kind == HUGGINGFACE:
        check_huggingface(spec.path)
    longest(spec)


def common_text(specs: Sequence[SideSpec], items: Sequence[Item]) -> TextParts:
    """The first side's text, which the other side has to share; every side is checked.

    Raises:
        IngotError: as ``check_side`` and ``check_same_tokens``.
    """
    for spec in specs:
        check_side(spec)
        expect_text(model_of(spec.path).modality, "an evaluation of text", EVAL_WER)
    text = read_text(specs[0].path)
    for spec in specs[1:]:
        check_tokens_of(spec, text, items)
    return text


def check_tokens_of(spec: SideSpec, text: TextParts, items: Sequence[Item]) -> None:
    """Refuse a side whose ids mean something else; Hugging Face's class is given those of Ingot.

    Raises:
        ConfigError: as ``check_same_tokens``.
    """
    if spec.kind == INGOT:
        check_same_tokens(text, read_text(spec.path), items)


def usual_window(spec: SideSpec) -> int:
    """Most tokens of a window that nobody chose: the longest request, but of Qwen v1 no more than it was
    trained on, so that it is the same alone and beside Hugging Face's class, which ends there.

    Raises:
        IngotError: as ``longest``.
    """
    if is_engine(Path(spec.path)):
        trained = trained_length(Manifest.read(Path(spec.path)).model)
        return min(longest(spec), trained or longest(spec))
    return longest(spec.replace(kind=HUGGINGFACE))
