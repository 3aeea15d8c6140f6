"""What differs between two engine folders: configs, tensors, files, plans, versions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from ingot.config.json_config import JsonConfig
from ingot.engine.integrity import check_engine
from ingot.engine.manifest import (
    PLAN_FILE,
    PROOF_FILE,
    TOKENIZER_FOLDER,
    WEIGHTS_FILE,
    Manifest,
    TensorEntry,
)
from ingot.engine.plan_file import plan_data
from ingot.engine.proof_file import read_proof
from ingot.engine.weight_meaning import EngineWeights, comparable
from ingot.errors import EngineError

ABSENT = "(absent)"
_CHUNK = 1 << 22  # values compared at once
_OWN_SECTIONS = ("tensors", "files", "ingot_version", "format_version")

Progress = Callable[[str, int, int], None]
Aspect = Literal["shape", "dtype", "values", "bytes"]


@dataclass(frozen=True)
class FieldChange(JsonConfig):
    """A value that differs; ``ABSENT`` stands on the side that lacks it."""

    name: str
    left: Any
    right: Any


@dataclass(frozen=True)
class TensorChange(JsonConfig):
    """A tensor that only one engine has (the other side is None), or that differs.

    Attributes:
        aspects: what differs; empty for a tensor of one side. ``bytes``: other bytes for equal values.
        max_abs: largest |left - right|, for equal shapes.
        relative: ‖left - right‖₂ / ‖left‖₂, for equal shapes; infinite where left is all zero.
    """

    name: str
    left: TensorEntry | None
    right: TensorEntry | None
    aspects: tuple[Aspect, ...] = ()
    max_abs: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class LayerChange(JsonConfig):
    """A linear layer that is quantized in at least one engine, and whose tensors differ.

    Attributes:
        left, right: scheme, or the dtype of a layer that is not quantized.
        max_abs, relative: as of ``TensorChange``, of the dequantized weights; None: they are not comparable.
    """

    name: str
    left: str
    right: str
    max_abs: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class Comparison(JsonConfig):
    """Every difference, by kind: configs by dotted name, tensors, other files by sha256, plan, versions.

    ``layers`` are the differences of quantized layers' dequantized weights; ``incomparable``: why there are
    none. ``metrics`` of the proofs are shown and not counted: they depend on where they were measured.
    """

    config: tuple[FieldChange, ...]
    tensors: tuple[TensorChange, ...]
    files: tuple[FieldChange, ...]
    plan: tuple[FieldChange, ...]
    versions: tuple[FieldChange, ...]
    metrics: tuple[FieldChange, ...] = ()
    layers: tuple[LayerChange, ...] = ()
    incomparable: str | None = None

    @property
    def equal(self) -> bool:
        return not (self.config or self.tensors or self.files or self.plan or self.versions)


def compare_engines(left: Path, right: Path, progress: Progress | None = None) -> Comparison:
    """Compare two engine folders, after a check that each is as it was built.

    Args:
        progress: called as (tensor name, tensors done, tensors in all) while weights are read.

    Raises:
        EngineError: one of them is no engine, cannot be read, or is damaged.
    """
    a, b = Manifest.read(left), Manifest.read(right)
    for folder, manifest in ((left, a), (right, b)):
        check_engine(folder, manifest)
    tensors = _tensor_changes(left, right, a.tensors, b.tensors, progress)
    doubt = None if a.quant.dense and b.quant.dense else comparable(a.quant, b.quant)
    layers = _layer_changes(EngineWeights(left, a), EngineWeights(right, b), tensors, doubt)
    own, other = _facts(left, a), _facts(right, b)
    changes = {kind: field_changes(own[kind], other[kind]) for kind in own}
    return Comparison(**changes, tensors=tensors, layers=layers, incomparable=doubt)


def field_changes(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """Leaves of two nested mappings that differ, by dotted name, in the order of ``left``."""
    a, b = dict(_leaves(left)), dict(_leaves(right))
    pairs = ((name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in {**a, **b})
    return tuple(FieldChange(*pair) for pair in pairs if pair[1] != pair[2])


def difference(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Largest |left - right| and ‖left - right‖₂ / ‖left‖₂ of two tensors of one shape, in float64.

    0 for empty tensors; the ratio is infinite where only left is all zero.
    """
    error, norm, gaps = 0.0, 0.0, [torch.zeros((), dtype=torch.float64)]
    for a, b in zip(left.reshape(-1).split(_CHUNK), right.reshape(-1).split(_CHUNK), strict=True):
        if a.numel():
            wide = a.double()
            gap = wide - b.double()
            gaps.append(gap.abs().max())
            error += float(gap.square().sum())
            norm += float(wide.square().sum())
    largest = float(torch.stack(gaps).max())  # NaN where any is
    if error == 0:
        return largest, 0.0
    return largest, math.sqrt(error / norm) if norm else math.inf


def _leaves(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, item in value.items():
        inner = isinstance(item, Mapping) and item
        leaves += _leaves(item, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", item)]
    return leaves


def _facts(folder: Path, manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    """What is compared as fields, by the names of ``Comparison``."""
    files = {f"{TOKENIZER_FOLDER}/{name}": digest for name, digest in manifest.files.items()}
    if (folder / PROOF_FILE).is_file():  # the rest of it depends on the machine
        files[PROOF_FILE] = "a proof"
    try:
        proof = read_proof(folder)
    except EngineError:  # ``verify`` reports a damaged one
        proof = None
    metrics = {
        f"{m.name} on {m.data} ({m.data_sha256[:8]})"
        + (f" against {m.against}" if m.against else ""): m.value
        for m in (() if proof is None else proof.claims.metrics)
    }
    return {
        "config": {k: v for k, v in manifest.to_json().items() if k not in _OWN_SECTIONS},
        "files": files,
        "plan": plan_data(folder / PLAN_FILE) or {},  # check_engine has read it
        "versions": {"ingot_version": manifest.ingot_version, "format_version": manifest.format_version},
        "metrics": metrics,
    }


def _tensor_changes(
    left: Path,
    right: Path,
    a: Mapping[str, TensorEntry],
    b: Mapping[str, TensorEntry],
    progress: Progress | None,
) -> tuple[TensorChange, ...]:
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    if not any(name in a and name in b for name in names):
        return tuple(TensorChange(name, a.get(name), b.get(name)) for name in names)
    paths = (left / WEIGHTS_FILE, right / WEIGHTS_FILE)
    changes = []
    try:
        with safe_open(paths[0], framework="pt") as one, safe_open(paths[1], framework="pt") as two:
            for done, name in enumerate(names, start=1):
                own, other = a.get(name), b.get(name)
                change = TensorChange(name, own, other)
                if own is not None and other is not None:
                    aspects: tuple[Aspect, ...] = ("dtype",) if own.dtype != other.dtype else ()
                    if own.shape != other.shape:
                        change = TensorChange(name, own, other, ("shape", *aspects))
                    else:
                        max_abs, relative = difference(one.get_tensor(name), two.get_tensor(name))
                        aspects += ("values",) if max_abs != 0 else ()
                        change = TensorChange(name, own, other, aspects or ("bytes",), max_abs, relative)
                changes.append(change)
                if progress is not None:
                    progress(name, done, len(names))
    except (SafetensorError, OSError) as error:
        raise EngineError(
            "weights cannot be read", seen=f"{paths[0]} or {paths[1]}: {error}", fix="build it again"
        ) from None
    return tuple(changes)


def _layer_changes(
    left: EngineWeights, right: EngineWeights, tensors: Sequence[TensorChange], doubt: str | None
) -> tuple[LayerChange, ...]:
    """Quantized layers among the changed tensors; weights are compared unless there is a ``doubt``."""
    one, two = left.quantized, right.quantized
    both = set(left.names()) & set(right.names())
    found = []
    for name in dict.fromkeys(change.name.rpartition(".")[0] for change in tensors):
        if name not in one and name not in two:
            continue
        dtypes = (side.manifest.build.dtypes.at(name) for side in (left, right))
        schemes = (one.get(name, next(dtypes)), two.get(name, next(dtypes)))
        weight = f"{name}.weight"
        if (
            doubt is None
            and weight in both
            and (a := left.read(weight)).shape == (b := right.read(weight)).shape
        ):
            found.append(LayerChange(name, *schemes, *difference(a, b)))
        else:
            found.append(LayerChange(name, *schemes))
        left.release()
        right.release()
    return tuple(found)
