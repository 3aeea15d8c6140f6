"""Which stored tensors become which of a model's, declared as rules.

For GPT-2:

    WEIGHTS = WeightMap((Rename("embed.weight", "wte.weight"),
                         Transpose("layers.{layer}.qkv.weight", "h.{layer}.attn.c_attn.weight"),
                         Tie("lm_head.weight", "embed.weight"),
                         Ignore("*.attn.masked_bias")),
                        num_layers=12, prefixes=("transformer.", ""))
    tensors = [mapped.load(checkpoint) for mapped in resolve(WEIGHTS, checkpoint.tensors, expected_shapes)]
"""

from __future__ import annotations

import fnmatch
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ingot.checkpoint.checkpoint_files import shorten
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.checkpoint.name_rules import (
    Concat,
    Filled,
    Ignore,
    Rename,
    RowsFrom,
    Rule,
    Shape,
    SplitRule,
    SquarePositions,
    Squeezed,
    Tie,
    Transform,
    Transpose,
    has_layer,
)
from ingot.checkpoint.shard_reader import TensorInfo
from ingot.errors import CheckpointError

__all__ = [
    "Concat",
    "Filled",
    "Ignore",
    "MappedTensor",
    "Rename",
    "RowsFrom",
    "SplitRule",
    "SquarePositions",
    "Squeezed",
    "Tie",
    "Transpose",
    "WeightMap",
    "resolve",
    "stored_copies",
]


@dataclass(frozen=True)
class WeightMap:
    """All rules of a model.

    Attributes:
        rules: names may hold ``{layer}``; sources are written without prefix.
        num_layers: layers in the checkpoint; ``{layer}`` stands for 0 to ``num_layers - 1``.
        layers: (start, end) builds only those layers, numbered from 0 in the model. Tensors of the others are
            neither read nor needed, nor unexpected.
        prefixes: the first under which the checkpoint holds any source is taken. A source that is not there
            under it (``lm_head.weight`` beside ``transformer.*``) is looked for without.
    """

    rules: tuple[Rule, ...]
    num_layers: int = 0
    layers: tuple[int, int] | None = None
    prefixes: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        start, end = self.range
        if self.layers is not None and not 0 <= start < end <= self.num_layers:
            raise CheckpointError(
                "no such range of layers",
                seen=f"{start}:{end}",
                allowed=f"0 <= START < END <= {self.num_layers}",
                field="layers",
                fix="`layers=START:END`",
            )

    @property
    def range(self) -> tuple[int, int]:
        """First layer that is built, and the one after the last."""
        return self.layers if self.layers is not None else (0, self.num_layers)

    def transforms(self) -> list[Transform]:
        """The rules that make a tensor, one for each layer that is built."""
        start, end = self.range
        own = [rule for rule in self.rules if isinstance(rule, Transform)]
        return [
            rule.bind(layer, layer - start)
            for rule in own
            for layer in (range(start, end) if has_layer(rule) else range(start, start + 1))
        ]

    def left_out(self) -> set[str]:
        """Sources, without prefix, of the layers that are not built."""
        start, end = self.range
        own = [rule for rule in self.rules if isinstance(rule, Transform) and has_layer(rule)]
        others = [layer for layer in range(self.num_layers) if not start <= layer < end]
        return {name for rule in own for layer in others for name in rule.bind(layer, layer).inputs}


@dataclass(frozen=True)
class MappedTensor:
    """How one of the model's tensors comes from the checkpoint.

    Attributes:
        target: name in the model.
        sources: names in the checkpoint.
        shape: as the model has it; ``dtype``: as the checkpoint has it.
        tied_to: the target whose tensor this one is; such a one need not be loaded or stored.
    """

    target: str
    sources: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    tied_to: str | None
    rule: Transform = field(repr=False)

    def load(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read the sources and make the tensor: ``shape``, ``dtype``, CPU, contiguous.

        ``dtype``: what the caller will cast to (``Checkpoint.read``), where a rule computes nothing.
        """
        wanted = dtype if type(self.rule) in (Rename, Concat) else None
        tensors = [checkpoint.read(name, wanted) for name in self.sources]
        return self.rule.build(self.tied_to or self.target, tensors).contiguous()


def resolve(
    weight_map: WeightMap, available: Mapping[str, TensorInfo], expected: Mapping[str, Shape]
) -> list[MappedTensor]:
    """Fit a map to a checkpoint's tensors and a model's shapes; no tensor is read.

    Returns one entry for each of ``expected``, in its order. Raises one CheckpointError for all missing,
    unexpected, unused and mis-shaped tensors.
    """
    return _Resolver(weight_map, available, expected).run()


def stored_copies(weight_map: WeightMap, available: Mapping[str, TensorInfo]) -> list[tuple[str, str]]:
    """Tied tensors that a checkpoint has both of: (the copy's name, the name of what it is tied to)."""
    resolver = _Resolver(weight_map, available, {})
    sources = {rule.target: rule.source for rule in resolver.transforms if isinstance(rule, Rename)}
    pairs = [
        (resolver.stored(tie.copy or tie.target), resolver.stored(sources[tie.source_target]))
        for tie in resolver.ties.values()
        if tie.source_target in sources
    ]
    return [pair for pair in pairs if pair[0] in available and pair[1] in available]


class _Resolver:
    def __init__(
        self, weight_map: WeightMap, available: Mapping[str, TensorInfo], expected: Mapping[str, Shape]
    ) -> None:
        self.map = weight_map
        self.available = available
        self.expected = expected
        self.transforms = weight_map.transforms()
        self.ties = {r.target: r for r in weight_map.rules if isinstance(r, Tie)}
        sources = {name for rule in self.transforms for name in rule.inputs}
        held = (p for p in weight_map.prefixes if any(p + name in available for name in sources))
        self.prefix = next(held, weight_map.prefixes[0])
        self.problems: dict[str, list[str]] = {}

    def run(self) -> list[MappedTensor]:
        makers = {target: rule for rule in self.transforms for target in rule.outputs}
        self._check_targets(makers)
        self._check_sources()
        found = [self._mapped(target, makers) for target in self.expected]
        if self.problems:
            lists = [f"\n  {kind} ({len(items)}): {shorten(items)}" for kind, items in self.problems.items()]
            raise CheckpointError(
                "the checkpoint's tensors do not fit the model",
                seen="".join(lists),
                fix="check that config.json (of a .pt file: dims) belongs to these weights, and that the "
                "architecture is the right one",
            )
        return [mapped for mapped in found if mapped is not None]

    def stored(self, source: str) -> str:
        """Name in the checkpoint of a rule's source; the prefixed one where there is none."""
        bare = source in self.available and self.prefix + source not in self.available
        return source if bare else self.prefix + source

    def _note(self, kind: str, items: list[str]) -> None:
        if items:
            self.problems.setdefault(kind, []).extend(items)

    def _check_targets(self, makers: Mapping[str, Transform]) -> None:
        """The rules' targets and the model's tensors must be the same, each made once."""
        made = Counter(target for rule in self.transforms for target in rule.outputs)
        made.update(target for target in self.ties)
        self._note("made by two rules", [target for target, times in made.items() if times > 1])
        unused = [target for target in makers if target not in self.expected]
        unused += [
            f"{tie.source_target} (for the tied {tie.target})"
            for tie in self.ties.values()
            if tie.source_target not in makers
        ]
        self._note("unused rules, for tensors that the model does not have", unused)
        unmade = [name for name in self.expected if name not in makers and name not in self.ties]
        self._note("tensors of the model that no rule makes", unmade)

    def _check_sources(self) -> None:
        """The rules' sources and the checkpoint's tensors must be the same, except for what is ignored."""
        missing = [
            f"{self.stored(source)} (for {', '.join(rule.outputs)})"
            for rule in self.transforms
            for source in rule.inputs
            if self.stored(source) not in self.available
        ]
        self._note("missing from the checkpoint", missing)
        taken = {self.stored(source) for rule in self.transforms for source in rule.inputs}
        taken |= {self.stored(source) for source in self.map.left_out()}
        taken |= {self.stored(tie.copy or tie.target) for tie in self.ties.values()}
        patterns = [rule.pattern for rule in self.map.rules if isinstance(rule, Ignore)]
        extra = [n for n in self.available if n not in taken and not self._ignored(n, patterns)]
        self._note("unexpected tensors in the checkpoint", extra)

    def _ignored(self, name: str, patterns: Sequence[str]) -> bool:
        names = (name, name.removeprefix(self.prefix))
        return any(fnmatch.fnmatchcase(n, pattern) for n in names for pattern in patterns)

    def _mapped(self, target: str, makers: Mapping[str, Transform]) -> MappedTensor | None:
        tie = self.ties.get(target)
        made = tie.source_target if tie else target
        rule = makers.get(made)
        if rule is None:
            return None
        sources = tuple(self.stored(source) for source in rule.inputs)
        if any(source not in self.available for source in sources):
            return None
        infos = [self.available[source] for source in sources]
        try:
            shape = rule.shape(made, [info.shape for info in infos])
            dtype = functools.reduce(torch.promote_types, [info.dtype for info in infos] or [torch.float32])
        except (ValueError, RuntimeError) as error:
            self._note("mis-shaped", [f"{target}: {error}"])
            return None
        if shape != tuple(self.expected[target]):
            stored = f"{list(shape)} from {', '.join(sources)}"
            self._note("mis-shaped", [f"{target}: {stored}, the model has {list(self.expected[target])}"])
        return MappedTensor(target, sources, shape, dtype, tie.source_target if tie else None, rule)
