"""Which products of an engine round their inputs to few bits, by the names of the original."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.engine.assembly import Assembly
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.engine.weights_file import WeightsReader
from ingot.errors import CheckpointError
from ingot.layers.linear import linears
from ingot.quant.schemes.linear_scheme import LinearScheme

_RULE = ("input_scale", "steps", "zeros", "order")


@dataclass(frozen=True)
class Int8Input:
    """The input of one linear layer of the engine.

    Attributes:
        name: the engine's.
        originals: the checkpoint's modules that read it.
        scheme, tensors: the layer's, with what its rule takes: static scales, orders.
    """

    name: str
    originals: tuple[str, ...]
    scheme: LinearScheme
    tensors: Mapping[str, torch.Tensor]

    @property
    def placed(self) -> bool:
        """Whether it matters to the rule which channel is where."""
        return self.scheme.by_place

    def rounded(self, x: torch.Tensor, *, flips: bool) -> torch.Tensor:
        """What an input [..., K], fp32 or fp64, means once quantized; ``flips`` as in ``rounded_rows``."""
        return self.scheme.rounded(x, self.tensors, flips=flips)


def read_int8_inputs(engine: Path, checkpoint: Path) -> tuple[Int8Input, ...]:
    """The rounded inputs of an engine, built from a checkpoint; none where activations keep its dtype."""
    manifest, reader = Manifest.read(engine), WeightsReader(engine / WEIGHTS_FILE)
    with open_checkpoint(checkpoint) as source:
        assembly = Assembly.of(source, manifest.build, manifest.quant)
    return tuple(
        Int8Input(
            name,
            tuple(part.removesuffix(".weight") for part in assembly.mapped[f"{name}.weight"].sources),
            linear.scheme,
            {leaf: reader.read(f"{name}.{leaf}").clone() for leaf in _RULE if leaf in linear._parameters},
        )
        for name, linear in linears(assembly.model).items()
        if linear.scheme.rounds
    )


@contextmanager
def rounding(model: nn.Module, inputs: Sequence[Int8Input], *, flips: bool = False) -> Iterator[None]:
    """While the block runs, a model's modules read rounded inputs [..., K], in the dtype that they come in.

    The modules are those of the engine's names, or else those that end in the checkpoint's; CheckpointError
    where there is none. ``flips`` is as in ``rounded_rows``.
    """
    modules = dict(model.named_modules())
    handles = []
    try:
        for one in inputs:
            names = [one.name] if one.name in modules else []
            for original in () if names else one.originals:
                found = [name for name in modules if f".{name}".endswith(f".{original}")]
                if len(found) != 1:
                    raise CheckpointError(
                        "the original has no such linear layer, so its input cannot be rounded",
                        seen=f"{original}: {found}",
                        field="original",
                        fix="`original=ingot`",
                    )
                names += found
            handles += [modules[name].register_forward_pre_hook(_hook(one, flips)) for name in names]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(one: Int8Input, flips: bool) -> Any:
    def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x = given[0]
        wide = x if x.dtype == torch.float64 else x.float()
        return (one.rounded(wide, flips=flips).to(x.dtype), *given[1:])

    return hook
