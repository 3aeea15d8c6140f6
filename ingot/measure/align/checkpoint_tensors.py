"""An engine's tensors compared with those of a checkpoint, by name, without running a model."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.quantization.quant_config import HEAD, QuantConfig
from ingot.device import DTYPES, parse_dtype
from ingot.engine.assembly import Assembly, layer_of
from ingot.engine.manifest import is_engine
from ingot.engine.weight_meaning import EngineWeights, comparable
from ingot.layers.linear import linears
from ingot.measure.align.align_target import AlignTarget
from ingot.quant.methods.moved_weights import FAR, TINY, Moves

_HEAD, _EMBEDDING = f"{HEAD}.weight", "embed_tokens.weight"
_FEW = 16  # values that are listed one by one instead of as rows
_SAME = 1e-3  # relative L2 within which a tensor is another one, or one times a factor
_SAME_LENGTH = 0.01  # of a row that was rotated and rounded to 16 bits
_TURNED = 0.1  # relative L2 above which rows have other directions
Load = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the reference's. ``text`` says how; ``relative`` is the L2 of the difference."""

    name: str
    text: str
    relative: float


@dataclass(frozen=True)
class TensorCheck:
    """The number of compared tensors, those that differ, and why others were left out."""

    compared: int
    differences: tuple[TensorDifference, ...] = ()
    left_out: str | None = None

    @property
    def text(self) -> str:
        rest = "" if self.left_out is None else f"; others were not compared: {self.left_out}"
        if not self.differences:
            return f"tensors: equal ({self.compared} compared{rest})"
        return f"tensors: {len(self.differences)} of {self.compared} differ from the reference's{rest}"


@dataclass(frozen=True)
class _Sides:
    """Both sides' tensors by name, in the engine's dtype.

    Attributes:
        narrow: names of dequantized tensors, and their schemes.
        tolerance: of a copied value, relative and absolute; 0 if both sides' files have the same dtype.
        moves: how far rounding may move dequantized values (moved_weights.py).
    """

    names: list[str]
    got: Load
    expected: Load
    narrow: dict[str, str]
    tolerance: tuple[float, float]
    moves: Moves


def compare_tensors(target: AlignTarget, checkpoint: Path) -> TensorCheck:
    """Every tensor of an engine, or of a checkpoint, beside those of the original.

    Copied weights must be equal bit by bit, or within one unit of the coarser dtype if the files have
    different dtypes. Weights in fewer bits are compared dequantized: a row that is much farther off than
    others differs, and of values chosen by samples a column that is another one.
    """
    with ExitStack() as stack:
        sides, left_out = _open(target, checkpoint, stack)
        limits = _limits(sides)
        found = []
        for name in sides.names:
            expected, got = sides.expected(name).float(), sides.got(name).float()
            wrong = _wrong(expected, got, sides, name, limits)
            if bool(wrong.any()):
                relative = _relative(expected, got)
                found.append(TensorDifference(name, _how(name, expected, got, wrong, sides), relative))
    return TensorCheck(len(sides.names), tuple(found), left_out)


def _open(target: AlignTarget, checkpoint: Path, stack: ExitStack) -> tuple[_Sides, str | None]:
    original = stack.enter_context(open_checkpoint(checkpoint))
    theirs = Assembly.of(original, target.build, QuantConfig())
    folder, quant, narrow = Path(target.path), target.quant, {}
    if is_engine(folder):
        weights = EngineWeights(folder)
        names, load, source_dtype = list(weights.names()), weights.read, weights.manifest.source_dtype
        narrow = {f"{layer}.weight": scheme for layer, scheme in weights.quantized.items()}
    else:
        source = stack.enter_context(open_checkpoint(folder))
        ours = Assembly.of(source, target.build, QuantConfig())
        names, source_dtype = list(ours.mapped), ours.source_dtype
        load = lambda name: ours.original(name, source)  # noqa: E731
        narrow = {f"{name}.weight": quant.label for name in linears(ours.model)} if not quant.dense else {}
    doubt = None if quant.dense else comparable(quant, QuantConfig())
    if doubt is not None:
        names = [] if quant.rotation else [name for name in names if layer_of(name) is None]
    dtypes = {*astuple(target.build.dtypes), *source_dtype.split("+"), *theirs.source_dtype.split("+")}
    kinds = [torch.finfo(parse_dtype(dtype)) for dtype in dtypes if dtype in DTYPES]
    tolerance = max(kind.eps for kind in kinds), max(kind.tiny * kind.eps for kind in kinds)
    tolerance = (0.0, 0.0) if source_dtype == theirs.source_dtype else tolerance
    unit = max(torch.finfo(parse_dtype(one)).eps for one in astuple(target.build.dtypes))
    moves = Moves(quant.method != "round" or bool(quant.source), max(tolerance[0], unit))
    known = [name for name in names if name in theirs.mapped]
    own_head = _HEAD in theirs.mapped and theirs.mapped[_HEAD].tied_to is None
    if own_head and _HEAD not in known and _EMBEDDING in known:  # the engine's is its embedding
        known.append(_HEAD)
    got: Load = lambda name: load(name if name in names else _EMBEDDING)  # noqa: E731
    expected: Load = lambda name: theirs.original(name, original)  # noqa: E731
    return _Sides(known, got, expected, narrow, tolerance, moves), doubt


def _limits(sides: _Sides) -> dict[str, float]:
    """How far a row of a dequantized tensor may move, as a share of its largest value, by scheme."""
    medians: dict[str, list[float]] = {}
    for name in filter(sides.narrow.get, sides.names):
        moved = sides.moves.by_row(sides.expected(name).float(), sides.got(name).float())
        medians.setdefault(sides.narrow[name], []).append(float(moved.median()))
    return {scheme: sides.moves.limit(statistics.median(values)) for scheme, values in medians.items()}


def _wrong(
    expected: torch.Tensor, got: torch.Tensor, sides: _Sides, name: str, limits: dict[str, float]
) -> torch.Tensor:
    """bool: values beyond what dtypes explain; of weights in fewer bits whole rows and columns."""
    scheme = sides.narrow.get(name)
    if scheme is None:
        relative, absolute = sides.tolerance
        return ~((got - expected).abs() <= relative * expected.abs() + absolute)
    return sides.moves.wrong(expected, got, limits[scheme])


def _relative(expected: torch.Tensor, got: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp(min=TINY))


def _how(name: str, expected: torch.Tensor, got: torch.Tensor, wrong: torch.Tensor, sides: _Sides) -> str:
    """How a tensor differs, in the simplest way that explains it."""
    count, narrow = int(wrong.sum()), name in sides.narrow
    same = _SAME
    if narrow:  # rounding's error of a row, if most rows are right, up to 0.2
        median = float(((got - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)).median())
        same = max(_SAME, 1.5 * (min(0.2, median) if median < FAR else 0.2))
    if not narrow and count <= _FEW < got.numel():
        return f"{count} of {got.numel()} values: {'; '.join(_values(expected, got, wrong))}"
    if float(got.min()) == float(got.max()):
        return f"all values are {float(got.min()):g}"
    if name == _HEAD and _relative(sides.expected(_EMBEDDING).float(), got) <= same:
        return "the head is the embedding (tied), and the reference has a head of its own"
    factor = float((got * expected).sum() / expected.square().sum().clamp(min=1e-30))
    if abs(factor - 1) > _SAME and _relative(factor * expected, got) <= same:
        return f"the reference's times {factor:.4g}"
    kind = re.compile(re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)))
    for other in sides.names:  # the same tensor of other layers
        if other != name and kind.fullmatch(other) and _relative(sides.expected(other).float(), got) <= same:
            return f"it is the reference's {other}"
    if got.dim() == 2 and got.shape[0] == got.shape[1] and _relative(expected.t(), got) <= same:
        return "the reference's, transposed"
    return f"{_which(wrong)}; relative L2 {_relative(expected, got):.3g}{_turned(expected, got, wrong)}"


def _turned(expected: torch.Tensor, got: torch.Tensor, wrong: torch.Tensor) -> str:
    """What rows of the same lengths and other directions suggest. Rows of another tensor have other lengths,
    and rows in another order have them in another order.
    """
    if got.dim() != 2 or not bool(wrong.any(1).all()):
        return ""
    ours, theirs = got.norm(dim=1), expected.norm(dim=1)
    lengths = float(((ours - theirs).abs() / theirs.clamp(min=TINY)).max())
    if lengths > _SAME_LENGTH or _relative(expected, got) < _TURNED:
        return ""
    return "; every row keeps its length, as where this product's inputs are rotated or in another order"


def _which(wrong: torch.Tensor) -> str:
    """The rows with wrong values, or the columns if all rows have some; of a vector the values."""
    lines, unit = (wrong.flatten(1).any(1), "rows") if wrong.dim() > 1 else (wrong, "values")
    if wrong.dim() == 2 and bool(lines.all()) and not bool(wrong.any(0).all()):
        lines, unit = wrong.any(0), "columns"
    places = lines.nonzero().flatten()
    return f"{len(places)} of {len(lines)} {unit}, from {int(places[0])} to {int(places[-1])}"


def _values(expected: torch.Tensor, got: torch.Tensor, wrong: torch.Tensor) -> Iterator[str]:
    for place in wrong.nonzero()[:3].tolist():
        at = tuple(place)
        yield f"{place} is {float(got[at]):.6g} instead of {float(expected[at]):.6g}"
