"""Names the modules of a step: a range of the profiler around each, and the least work that each does.

with named_modules(model, ProfilerRanges()): step()

The methods of the layers are wrapped while the block is open, and only then: a step outside costs nothing. A
kernel that does the work of several modules counts as the product that launches it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from ingot.layers.attention import Attention
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.decoder import Decoder
from ingot.layers.encoder_blocks.encoder import BidirectionalAttention
from ingot.layers.encoder_blocks.qformer import PatchAttention
from ingot.layers.linear import Linear, linears
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import Norm
from ingot.layers.products import row_forms
from ingot.layers.products.layer_products import Product
from ingot.measure.bench.profile import module_work
from ingot.measure.bench.profile.replaced import replaced
from ingot.measure.bench.profile.step_figures import LeastWork
from ingot.runtime.sampling.pending_tokens import TokenFeed
from ingot.runtime.step import runner, sampled_step
from ingot.runtime.step.step_buffer import StepBuffer

ENCODER, SAMPLING, INPUTS = "encoder", "sampling", "inputs"
_LABELS = {
    "qkv_proj": "qkv",
    "o_proj": "o",
    "gate_up_proj": "gate_up",
    "up_proj": "up",
    "down_proj": "down",
    "lm_head": "head",
}
_PRODUCT_METHODS = ("full_output", "added", "heads", "inner", "join")

Work = Callable[..., LeastWork]


class Ranges:
    """Receives the modules of a step; this one does nothing with them."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, bool]] = []

    def open(self, label: str) -> AbstractContextManager[Any]:
        """What surrounds a module's call."""
        return nullcontext()

    def add(self, label: str, work: Callable[[], LeastWork]) -> None:
        """Called once per call of a module; ``work()`` may wait for the device."""

    @contextmanager
    def within(self, label: str, work: Callable[[], LeastWork] | None) -> Iterator[None]:
        """A module's call. What it calls of itself is part of it; what an encoder calls is named so."""
        if label != ENCODER and any(name == ENCODER for name, _ in self._stack):
            label = f"{ENCODER} {label}"
        inner = bool(self._stack) and self._stack[-1][0] == label
        counted = inner and self._stack[-1][1]
        if work is not None and not counted:
            self.add(label, work)
        self._stack.append((label, counted or work is not None))
        try:
            with nullcontext() if inner else self.open(label):
                yield
        finally:
            self._stack.pop()


class ProfilerRanges(Ranges):
    """Ranges of ``torch.profiler``."""

    def open(self, label: str) -> AbstractContextManager[Any]:
        from torch.profiler import record_function

        return record_function(label)


class WorkCount(Ranges):
    """``work``: the least work of each module in the steps that ran meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[str, LeastWork] = defaultdict(LeastWork)

    def add(self, label: str, work: Callable[[], LeastWork]) -> None:
        self.work[label] += work()


@contextmanager
def named_modules(model: Decoder, ranges: Ranges) -> Iterator[None]:
    """Name the modules of every step of ``model`` that runs without a graph in the block."""
    labels = {id(linear): _label(name) for name, linear in linears(model).items()}
    with ExitStack() as patches:
        for owner, name, label, work in _sites(labels):
            original = getattr(owner, name)
            patches.enter_context(replaced(owner, name, _wrapped(original, ranges, label, work)))
        yield


def _label(name: str) -> str:
    """qkv, o, gate_up, up, down, head; of cross-attention cross_q, cross_kv, cross_o."""
    *parents, leaf = name.split(".")
    short = _LABELS.get(leaf, leaf.removesuffix("_proj"))
    return f"cross_{short}" if parents and parents[-1] == "encoder_attn" else short


Label = str | Callable[[Any], str]


def _sites(labels: dict[int, str]) -> Iterator[tuple[Any, str, Label, Work | None]]:
    """What is wrapped: an owner, a name, its label, and how its work follows from its arguments."""

    def of_product(product: Product) -> str:
        return labels.get(id(product.linear), "product")

    def of_linear(linear: Linear) -> str:
        return labels.get(id(linear), "product")

    for kind in (Product, *_subclasses(Product)):
        for name in _PRODUCT_METHODS:
            if name in vars(kind):
                yield kind, name, of_product, module_work.of_product
        if "in_form" in vars(kind):
            yield kind, "in_form", of_product, None
    yield Linear, "forward", of_linear, module_work.of_linear
    for kind in _subclasses(row_forms.Form):
        if "activation" in vars(kind):
            yield kind, "activation", "activation", module_work.of_formed_activation
        if "attention" in vars(kind):
            yield kind, "attention", "attention", None
    yield row_forms.Form, "post_norm", "norm", module_work.of_post_norm
    yield Norm, "ended", "norm", module_work.of_norm
    yield Norm, "of_parts", "norm", module_work.of_summed_norm
    yield Attention, "place", "rope", module_work.of_rope
    yield Attention, "attend", "attention", module_work.of_attention
    yield CrossAttention, "attend", "cross_attention", module_work.of_cross_attention
    yield CrossAttention, "write", "cross_kv", None
    yield BidirectionalAttention, "attend", "attention", module_work.of_bidirectional
    yield PatchAttention, "attend", "cross_attention", module_work.of_patch_attention
    yield GatedMLP, "activate", "activation", module_work.of_gate
    yield MLP, "activate", "activation", module_work.of_activation
    yield Decoder, "embed", "embed", module_work.of_embedding
    yield Decoder, "capped", "head", None
    yield Decoder, "encode", ENCODER, None
    yield StepBuffer, "fill", INPUTS, None
    yield StepBuffer, "upload", INPUTS, None
    yield sampled_step, "take_tokens", INPUTS, None
    yield sampled_step, "leave_tokens", SAMPLING, module_work.of_sampling
    yield runner, "leave_tokens", SAMPLING, module_work.of_sampling
    yield TokenFeed, "send", SAMPLING, None


def _wrapped(call: Callable[..., Any], ranges: Ranges, label: Label, work: Work | None) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(first: Any, *args: Any, **named: Any) -> Any:
        name = label if isinstance(label, str) else label(first)
        counted = None if work is None else functools.partial(work, first, *args, **named)
        with ranges.within(name, counted):
            return call(first, *args, **named)

    return wrapped


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    sub: type[Any]
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)
