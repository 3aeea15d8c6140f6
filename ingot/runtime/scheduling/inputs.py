"""Inputs that a request carries beside token ids (pictures, speech), and which of them a model takes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.control_groups import usable_processors
from ingot.errors import RequestError
from ingot.layers.encoder_blocks.encoder import Encoder

_MOST_THREADS = 8


class Content(NamedTuple):
    """``features``: what is encoded, float32, or rows in the model's dtype. ``digest``: of shape and values,
    or their name; equal ones are encoded once.
    """

    features: torch.Tensor
    digest: bytes


@dataclass(frozen=True, eq=False)
class RequestInput:
    """One input of a request.

    Attributes:
        content: copied and hashed on another thread, unless it has a name; the first reader waits.
        positions: its number of outputs.
        place: index in the prompt of its first placeholder token.
        tokens: its placeholders: one for each position (wiring ``prefix``), or none.
        encodes: False: its features are themselves the rows of its placeholders (prompt_rows.py).
    """

    content: Future[Content]
    positions: int
    place: int = 0
    tokens: int = 0
    encodes: bool = True

    @property
    def features(self) -> torch.Tensor:
        return self.content.result().features

    @property
    def digest(self) -> bytes:
        return self.content.result().digest

    @property
    def end(self) -> int:
        """Index in the prompt behind its last placeholder."""
        return self.place + self.tokens

    def is_read_by(self, start: int, end: int) -> bool:
        """Whether the tokens [start, end) need it; without placeholders all do."""
        return not self.tokens or (self.place < end and start < self.end)


@dataclass(eq=False)
class EncoderEntry:
    """An encoded input: blocks of the encoder cache, in order, and how many requests hold them. Not ``ready``
    while it is encoded in parts: no step may read it.
    """

    digest: bytes
    blocks: list[int]
    positions: int
    holders: int = 0
    ready: bool = True

    @cached_property
    def table(self) -> np.ndarray:
        """``blocks`` as an array: every step copies it."""
        return np.array(self.blocks, dtype=np.int32)


@dataclass(frozen=True)
class EncoderJob:
    given: RequestInput
    entry: EncoderEntry


@dataclass(frozen=True)
class InputRules:
    """Which inputs a model with an encoder takes."""

    model: DecoderConfig
    encoder: Encoder
    cache_positions: int

    @property
    def config(self) -> EncoderConfig:
        assert self.model.encoder is not None
        return self.model.encoder

    def read(self, features: object, place: int, name: bytes | None = None) -> RequestInput:
        """An input from a tensor, or what torch makes one of, at a place in the prompt. Without a name, its
        values may be overwritten once ``check`` has returned.

        Raises:
            RequestError: it is not a tensor of the right shape, or has too many positions.
        """
        tensor = self._tensor(features)
        positions = self.encoder.positions(tuple(tensor.shape))
        most = min(self.config.max_positions, self.cache_positions)
        if not 0 < positions <= most:
            raise RequestError(
                "the input has too many positions",
                seen=f"{positions} positions of features {list(tensor.shape)}",
                allowed=f"1 to {most}",
                fix="a shorter input, or a larger encoder_positions",
            )
        content: Future[Content] = Future()
        if name is None:
            content = _threads(os.getpid()).submit(_content, tensor)
        else:
            content.set_result(Content(tensor.float(), name))
        return RequestInput(content, positions, place, tokens=positions if self.model.splices else 0)

    def blank(self, value: float) -> RequestInput | None:
        """The longest input, all of one value, for dummy requests; None: the cache is too small."""
        longest = self.encoder.longest
        if self.encoder.positions(longest) > self.cache_positions:
            return None
        return self.read(torch.full(longest, value), 0)

    def placeholders(self, given: RequestInput) -> list[int]:
        """The token ids that stand in the prompt for an input."""
        return [self.config.placeholder_id] * given.tokens

    def check(self, inputs: Sequence[RequestInput]) -> None:
        """Raises:
        RequestError: more inputs than a request to this model may have, or values that are not finite.
        """
        if self.model.crosses and len(inputs) > 1:
            raise RequestError(
                "a request to this model takes one input", seen=f"{len(inputs)} inputs", allowed="at most 1"
            )
        for given in inputs:
            given.content.result()

    def _tensor(self, features: object) -> torch.Tensor:
        try:
            tensor = torch.as_tensor(features).detach()
            tensor = tensor if tensor.is_floating_point() else tensor.to(torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(
                "an input's features must be a tensor of numbers", seen=error, fix="the input"
            ) from None
        if not self.config.takes(tuple(tensor.shape)):
            allowed = " x ".join(str(size) if size else "any" for size in self.config.features)
            raise RequestError(
                "the input's features have another shape than the model takes",
                seen=f"{list(tensor.shape)}",
                allowed=allowed,
                fix="the features: they must be made as for this model",
            )
        return tensor


def _content(tensor: torch.Tensor) -> Content:
    """A copy, so that what is hashed stays, by NumPy: PyTorch would start threads of its own."""
    features = np.array(tensor.to("cpu", torch.float32).numpy(), order="C")
    finite = np.isfinite(features)
    if not finite.all():
        raise RequestError(
            "the input's features hold values that are not finite",
            seen=f"{features.size - int(finite.sum())} of {features.size} are NaN or infinite",
            fix="the input",
        )
    digest = hashlib.blake2b(repr(features.shape).encode(), digest_size=16)
    digest.update(features.data)
    return Content(torch.from_numpy(features), digest.digest())


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Of this process: a fork lacks those of the other."""
    return ThreadPoolExecutor(min(_MOST_THREADS, usable_processors()), "ingot-input")


def no_inputs() -> RequestError:
    """The error for an input of a model without an encoder."""
    return RequestError(
        "only text and token ids are taken here",
        seen="an input",
        fix="leave it out, or take an engine whose model has an encoder",
    )
