"""Outputs of modules chosen by name, and rows of steps, collected by forward hooks while an engine runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ingot.errors import RequestError
from ingot.layers.attention import Attention
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.decoder import DecoderLayer
from ingot.layers.encoder_blocks.encoder import BidirectionalAttention
from ingot.layers.forward_batch import ForwardBatch
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import HeadNorm
from ingot.layers.rotary import RotaryTable
from ingot.runtime.executor import Executor

_NEVER_CALLED = (nn.ModuleList, RotaryTable, HeadNorm)  # their values are read by others
_LAST = {  # whose output is the module's
    Attention: "o_proj",
    CrossAttention: "o_proj",
    BidirectionalAttention: "o_proj",
    GatedMLP: "down_proj",
    MLP: "down_proj",
}
# What every step has, of ``ForwardBatch``; beside them is ``step.visible.N`` of each layer.
_STEP = ("input_ids", "positions", "query_start", "seq_lens")


class Seen(Mapping[str, torch.Tensor]):
    """Module name → its output for every token that ran, in the order in which they ran, on the CPU.

    A decoder layer's output is its hidden states [tokens, hidden_size], an attention's or an MLP's what it
    adds to them, a norm's the normalised states.

    ``step.…`` are the steps' own rows, one step after another: ``step.input_ids`` and ``step.positions``
    [tokens] int64, ``step.seq_lens`` [requests] int32 (tokens in the cache after the step),
    ``step.query_start`` [requests + 1] int32 (cumulative new tokens, from 0 in each step), and
    ``step.visible.N`` [tokens, 2] int64, the mask of layer N's self-attention as the range of positions of
    its own request that each token sees: first, and one past the last.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, output: torch.Tensor) -> None:
        self._pieces.setdefault(name, []).append(output.detach().to("cpu", copy=True))

    def __getitem__(self, name: str) -> torch.Tensor:
        pieces = self._pieces[name]
        if len(pieces) > 1:
            self._pieces[name] = pieces = [torch.cat(pieces)]
        return pieces[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __repr__(self) -> str:
        return f"Seen({ {name: tuple(self[name].shape) for name in self} })"


@contextmanager
def tap(model: nn.Module, executor: Executor, *patterns: str) -> Iterator[Seen]:
    """Collect the outputs of the modules that the patterns name.

    ``*`` stands for one part of a dotted name (``layers.*``, ``layers.*.mlp``), ``**`` for any number of
    parts. Patterns that begin with ``step.`` name rows of the steps: ``step.*``, ``step.visible.*``.

    While it is open every module is called for every token: CUDA graphs, fused kernels and prefix reuse are
    off. What the encoder cache holds is not encoded again.

    Raises:
        RequestError: there is no pattern, or one matches no module that is called.
    """
    if not patterns:
        raise RequestError(
            "a tap needs at least one pattern", allowed="for example layers.*", fix="the tap's pattern"
        )
    names = [n for n, m in model.named_modules() if n and not isinstance(m, _NEVER_CALLED)]
    layers = [m for _, m in model.named_children() if isinstance(m, nn.ModuleList)]
    decoder = [layer for each in layers for layer in each if isinstance(layer, DecoderLayer)]
    rows = [*(f"step.{name}" for name in _STEP), *(f"step.visible.{i}" for i in range(len(decoder)))]
    wanted: dict[str, None] = {}
    for pattern in patterns:
        matcher, of_steps = _compile(pattern), pattern.startswith("step.")
        found = [name for name in (rows if of_steps else names) if matcher.fullmatch(name)]
        if not found:
            examples = [n for n in names if "." not in n] + [n for n in names if n.startswith("layers.0")]
            examples = rows[: len(_STEP) + 1] if of_steps else examples
            what = "a step has no such rows" if of_steps else "no module has that name"
            raise RequestError(what, seen=pattern, allowed=examples, fix="the tap's pattern")
        wanted |= dict.fromkeys(found)
    seen = Seen()
    handles = []
    of_step = [name for name in wanted if name.startswith("step.")]
    if of_step:
        handles.append(decoder[0].register_forward_pre_hook(_step_recorder(seen, of_step, decoder)))
    for name in (
        name for name in wanted if name not in of_step
    ):  # what a module computes may be its last product's output
        module = model.get_submodule(name)
        called = module.get_submodule(_LAST[type(module)]) if type(module) in _LAST else module
        handles.append(called.register_forward_hook(_recorder(seen, name)))
    runner, blocks = executor.runner, executor.blocks
    executor.before_taps.append((runner.eager, blocks.prefix_reuse))  # taps may close in any order
    runner.eager, blocks.prefix_reuse = True, False
    try:
        yield seen
    finally:
        runner.eager, blocks.prefix_reuse = executor.before_taps.pop()
        for handle in handles:
            handle.remove()


def _recorder(seen: Seen, name: str):  # type: ignore[no-untyped-def]
    def record(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, tuple):
            output = output[1] if isinstance(module, DecoderLayer) else output[0]
        if isinstance(output, torch.Tensor):
            seen.add(name, output)

    return record


def _step_recorder(seen: Seen, names: list[str], layers: list[DecoderLayer]):  # type: ignore[no-untyped-def]
    """A hook of the first layer, which every step calls once with its batch."""

    def record(module: nn.Module, inputs: tuple[object, ...]) -> None:
        batch = next(value for value in inputs if isinstance(value, ForwardBatch))
        for name in names:
            _, kind, *layer = name.split(".")
            window = layers[int(layer[0])].self_attn.scoring.window if layer else 0
            seen.add(name, visible(batch.positions, window) if layer else getattr(batch, kind))

    return record


def visible(positions: torch.Tensor, window: int) -> torch.Tensor:
    """[T] positions → [T, 2]: the first position that each token sees, and one past the last, its own.

    Args:
        window: tokens that it sees at most, itself included; 0: all.
    """
    end = positions + 1
    first = (end - window).clamp(min=0) if window else torch.zeros_like(end)
    return torch.stack([first, end], dim=-1)


def _compile(pattern: str) -> re.Pattern[str]:
    parts = []
    for part in pattern.split("."):
        parts.append(r".+" if part == "**" else re.escape(part).replace(r"\*", r"[^.]*"))
    return re.compile(r"\.".join(parts))
