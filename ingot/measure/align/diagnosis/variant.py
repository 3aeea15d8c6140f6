"""One thing changed in a stage, and the variants that any stage with weights has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ingot.measure.align.diagnosis.stage_spec import Spec

SpecT = TypeVar("SpecT", bound=Spec)


class Claim(NamedTuple):
    """A fault of the engine: a stable name and a clause in plain words."""

    culprit: str
    text: str


@dataclass(frozen=True)
class Variant(Generic[SpecT]):
    """A stage with one thing changed, and the change as a noun phrase ("the halves of ... exchanged").

    ``of_original`` is the engine's fault if the changed stage gives the original's output, ``of_engine`` if
    it gives the engine's and the unchanged one the original's.
    """

    spec: SpecT
    change: str
    of_original: Claim
    of_engine: Claim


def mirrored(spec: SpecT, change: str, culprit: str, text: str) -> Variant[SpecT]:
    """A variant with the same words whichever side has it."""
    return Variant(spec, change, Claim(culprit, text), Claim(culprit, text))


def bias_variants(
    spec: SpecT, fields: Sequence[str], culprit: str, name: str, rows: slice = slice(None), part: str = ""
) -> Iterator[Variant[SpecT]]:
    """The biases in ``fields``, or ``rows`` of them (a ``part``), left out, doubled and halved; ``culprit``
    is the stem of names such as ``qkv_bias_missing``, ``name`` the engine's tensor.
    """
    biases = {field: getattr(spec, field) for field in fields}
    if any(bias is None or not bool(bias[rows].any()) for bias in biases.values()):
        return
    what = f"the {part} bias {name}" if part else f"the bias {name}"
    missing, extra = (
        Claim(f"{culprit}_missing", f"{what} is missing"),
        Claim(f"{culprit}_extra", f"{what} is not in the original"),
    )
    doubled, halved = (
        Claim(f"{culprit}_doubled", f"{what} is added twice"),
        Claim(f"{culprit}_halved", f"{what} is half of the original's"),
    )
    yield Variant(_scaled(spec, biases, rows, 0.0), f"{what} left out", extra, missing)
    yield Variant(_scaled(spec, biases, rows, 0.5), f"half of {what}", doubled, halved)
    yield Variant(_scaled(spec, biases, rows, 2.0), f"{what} twice", halved, doubled)


def _scaled(spec: SpecT, biases: dict[str, torch.Tensor], rows: slice, factor: float) -> SpecT:
    changed: dict[str, Any] = {}
    for field, bias in biases.items():
        changed[field] = bias.clone()
        changed[field][rows] *= factor
    return replace(spec, **changed)


def transposed(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The weights [out, in] that the same values are if read in the other order: one of a square weight, two
    of any other (stored [in, out] but taken for [out, in], and the reverse).
    """
    rows, columns = weight.shape
    yield weight.reshape(columns, rows).t()
    if rows != columns:
        yield weight.t().reshape(rows, columns)


def transposed_variants(
    spec: SpecT, field: str, name: str, rows: slice | None = None
) -> Iterator[Variant[SpecT]]:
    """The weight in ``field`` (or ``rows`` of it, a part stored as a tensor of its own) read transposed."""
    weight: torch.Tensor = getattr(spec, field)
    for other in transposed(weight if rows is None else weight[rows]):
        whole = other
        if rows is not None:
            whole = weight.clone()
            whole[rows] = other
        yield mirrored(
            replace(spec, **{field: whole}),  # type: ignore[arg-type]
            f"{name} read [in, out] instead of [out, in]",
            "weight_transposed",
            f"{name} is transposed",
        )
