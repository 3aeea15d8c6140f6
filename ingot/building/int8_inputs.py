"""Which products of an engine round their inputs, to few bits or to 23, by the names of the original."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.weight_map import MappedTensor
from ingot.config.quantization.quant_config import HEAD
from ingot.engine.assembly import Assembly, model_of
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.engine.weights_file import WeightsReader
from ingot.errors import CheckpointError
from ingot.layers.linear import linears
from ingot.quant.plain_rows import split_rows
from ingot.quant.schemes.in_panels import split_columns
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


@dataclass(frozen=True)
class SplitInput:
    """The input of a linear layer that a CPU's kernels round to 23 bits; what that changes is noise.

    Attributes:
        name, originals: as of ``Int8Input``.
        columns: so many neighbours, in ``order`` [K], have a scale of their own.
    """

    name: str
    originals: tuple[str, ...]
    columns: int
    order: torch.Tensor | None

    def rounded(self, x: torch.Tensor, *, flips: bool) -> torch.Tensor:
        """An input [..., K]: as it is, or with noise (``flips``) rounded."""
        return split_rows(x, self.columns, self.order) if flips else x


RoundedInput = Int8Input | SplitInput


def read_split_inputs(engine: Path, checkpoint: Path | None) -> tuple[SplitInput, ...]:
    """The inputs that a CPU splits if the engine computes in fp32; without a ``checkpoint``
    they have no original names.
    """
    manifest, reader = Manifest.read(engine), WeightsReader(engine / WEIGHTS_FILE)
    mapped: Mapping[str, MappedTensor] = {}
    if checkpoint is not None:
        with open_checkpoint(checkpoint) as source:
            mapped = Assembly.of(source, manifest.build, manifest.quant).mapped
    found = []
    for name, linear in linears(model_of(manifest)).items():
        columns = split_columns(linear.scheme, linear.in_features)
        if columns:
            order = reader.read(f"{name}.order").clone() if "order" in linear._parameters else None
            found.append(SplitInput(name, _originals(mapped.get(f"{name}.weight")), columns, order))
    return tuple(found)


def _originals(mapped: MappedTensor | None) -> tuple[str, ...]:
    """The modules of a weight's sources; a tied head in fewer bits has a module of its own."""
    if mapped is None or mapped.tied_to is not None:
        return () if mapped is None else (HEAD,)
    return tuple(part.removesuffix(".weight") for part in mapped.sources)


@contextmanager
def rounding(model: nn.Module, inputs: Sequence[RoundedInput], *, flips: bool = False) -> Iterator[None]:
    """While the block runs, a model's modules read rounded inputs [..., K], in the dtype that they come in.

    The modules are those of the engine's names, or else those that end in the checkpoint's; CheckpointError
    where there is none. ``flips``: with noise, as in ``rounded``.
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


def _hook(one: RoundedInput, flips: bool) -> Any:
    def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x = given[0]
        wide = x if x.dtype == torch.float64 else x.float()
        return (one.rounded(wide, flips=flips).to(x.dtype), *given[1:])

    return hook
