"""What can be measured: Ingot's engines and Hugging Face's classes alike.

Owns the interface between a measurement and what it measures, and what a measurement adds to the description
of a model. Knows no measurement.

    side = open_side(SideSpec(path="engines/pocket-chat", max_batch_size=8))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ingot.errors import ConfigError
from ingot.measure.side.huggingface import check_huggingface
from ingot.measure.side.machine import Memory
from ingot.measure.side.model_spec import HUGGINGFACE, ModelSpec, read_text
from ingot.measure.side.step_work import Work
from ingot.measure.side.timed_run import Run
from ingot.measure.side.token_load import Ask
from ingot.text.tokenizer.tokenizer import Tokenizer

Say = Callable[[str], None]


def silent(text: str) -> None: ...


@dataclass(frozen=True)
class SideSpec(ModelSpec):
    """How to open a side; ``path`` is None with ``random_weights``.

    Attributes:
        random_weights: a config.json or its folder, to fill with random weights.
        max_batch_size: requests in one step; for ``hf`` the rows of one padded batch; not for an engine.
        engine_batch_size: requests in one step of an engine, at most what it was built for; None: that.
        cache_tokens: for Ingot; None: the library's default.
        batch_invariant: a request's bits do not depend on what runs beside it; not for ``hf``.
        prefix_reuse: let an engine reuse equal beginnings of prompts; not for ``hf``.
        name: what the record calls it; None: its kind.
    """

    random_weights: str | None = None
    max_batch_size: int = 64
    engine_batch_size: int | None = None
    cache_tokens: int | None = None
    batch_invariant: bool = False
    prefix_reuse: bool = True
    name: str | None = None

    @property
    def title(self) -> str:
        return self.name or self.kind


class Side(Protocol):
    """Something that answers requests greedily, ignoring end tokens."""

    name: str
    device: torch.device
    dtype: torch.dtype
    work: Work
    vocab_size: int
    max_seq_len: int
    max_batch_size: int

    def warm_up(self, most: int) -> None:
        """Compile and capture what batches of up to ``most`` requests need."""
        ...

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        """Answer all requests, given at once, and say when tokens arrived."""
        ...

    def resize(self, batch: int) -> None:
        """Make room for exactly ``batch`` of the longest requests; the weights stay, the peak starts anew.

        Raises:
            OutOfMemoryError: there is no such room.
        """
        ...

    def make_room(self, requests: int, tokens: int) -> None:
        """Let so many requests of ``tokens`` fit at once, as far as memory allows it."""
        ...

    def memory(self) -> Memory: ...

    def facts(self) -> dict[str, Any]: ...


def told_apart(one: SideSpec, other: SideSpec) -> tuple[SideSpec, SideSpec]:
    """Two sides of one kind, named by the last parts of their paths; by their paths where those are the same,
    and counted where the paths are, too.
    """
    if one.kind != other.kind:
        return one, other
    paths = [spec.path or spec.random_weights or "" for spec in (one, other)]
    counted = [f"{path}, {which}" for path, which in zip(paths, ("first", "second"), strict=True)]
    lasts = [Path(os.path.abspath(path)).name for path in paths]
    a, b = next(names for names in (lasts, paths, counted) if names[0] != names[1])
    return one.replace(name=a), other.replace(name=b)


def check_classes(specs: Iterable[SideSpec]) -> None:
    """Say early what would only fail once the turn of Hugging Face's class comes.

    Raises:
        DeviceError, CheckpointError: as ``check_huggingface``.
    """
    for spec in specs:
        if spec.kind == HUGGINGFACE:
            check_huggingface(spec.path)


def read_tokenizer(spec: SideSpec, without: str = "--mixed or --fixed instead of --requests") -> Tokenizer:
    """The tokenizer of what the spec names, without its weights; ``without`` is how to do without one.

    Raises:
        ConfigError: there is none.
        TokenizerError, EngineError: its files are broken, or an engine's are not those that were built.
    """
    tokenizer = None if spec.path is None else read_text(spec.path).tokenizer
    if tokenizer is None:
        raise ConfigError(
            "counting the tokens of texts needs a tokenizer",
            seen=spec.path or spec.random_weights,
            flag=f"{without}, or an engine with a tokenizer",
        )
    return tokenizer
