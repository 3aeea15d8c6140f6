"""An engine's stored tensors beside the checkpoint that it was built from.

Stored tensors are read by an unpacking of its own, and the checkpoint by published names (source_tensors.py,
minigpt4_names.py). One tensor of both is in memory, some rows at a time in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from ingot.building.golden.golden_cases import steady_threads
from ingot.building.source.folded_values import Folded
from ingot.building.source.minigpt4_names import PictureSource
from ingot.building.source.quantized_check import judge_narrow, plain_scales, plain_weight
from ingot.building.source.reordered_values import Reordered
from ingot.building.source.source_gguf import GgufRows, GgufSource
from ingot.building.source.source_tensors import MappedSource, Source, SourceTensors
from ingot.building.source.tensor_origin import Origin, Rotated, Uncertain
from ingot.checkpoint.checkpoint_reader import open_checkpoint, read_config
from ingot.checkpoint.gguf.gguf_file import GgufFile, is_gguf
from ingot.checkpoint.minigpt4_files import MiniGPT4Files, is_minigpt4
from ingot.config.quantization.quant_config import HEAD, QuantConfig
from ingot.device import parse_dtype
from ingot.engine.assembly import Assembly, StoringModule, model_of, storing_modules
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.engine.source_figures import Gathered, SourceDifference, SourceFigures
from ingot.engine.weights_file import WeightsReader
from ingot.errors import CheckpointError
from ingot.layers.decoder import Decoder
from ingot.layers.linear import Linear, linears
from ingot.models.model_registry import find_architecture

Progress = Callable[[str, int, int], None]
Rows = torch.Tensor | GgufRows
_log = logging.getLogger(__name__)
_ROWS = 1 << 22  # values that are compared at once
_SHAPE = (
    *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("num_kv_heads", "head_dim"),
)
_TINY = torch.finfo(torch.float32).tiny
_FLOAT = 2e-6  # of a row's largest: what fp32 does on the way


@dataclass(frozen=True)
class SourceCheck:
    """Figures of all tensors, and those that are off, in the order of the engine."""

    figures: SourceFigures
    differences: tuple[SourceDifference, ...]


@torch.inference_mode()
def compare_with_source(
    folder: Path,
    checkpoint: Path | MiniGPT4Files,
    device: torch.device,
    progress: Progress | None = None,
    model: Decoder | None = None,
) -> SourceCheck:
    """Compare every stored tensor of an engine with its source; a GPU that lacks the memory leaves it to the
    CPU.

    Args:
        checkpoint: a folder, a GGUF file, a ``.pt`` file of OpenAI's Whisper, or the files of a MiniGPT-4.
        device: where rows are widened and compared.
        progress: called as (what, modules done, modules in all).
        model: the engine's empty modules; None: they are made.

    Raises:
        CheckpointError: the checkpoint cannot be read, is of another model, or lacks a tensor.
        EngineError: the engine cannot be read.
    """
    manifest = Manifest.read(folder)
    _check_same_shape(manifest, checkpoint)
    reader = WeightsReader(folder / WEIGHTS_FILE)
    model = model or model_of(manifest)
    modules = list(storing_modules(model))
    num_bytes = sum(p.numel() * p.element_size() for one in modules for p in one.module.parameters(False))
    found, known = Gathered(), SourceTensors.knows(manifest.model)
    try:
        with steady_threads(num_bytes, device), _reading(manifest, checkpoint) as source:
            check = _Check(manifest, model, reader, source, device, found)
            for done, module in enumerate(modules):
                if progress is not None:
                    progress("comparing with the checkpoint", done, len(modules))
                check.module(module)
                reader.release()
    except torch.OutOfMemoryError:
        _log.warning("not enough GPU memory to compare the engine with its checkpoint; comparing on the CPU")
        return compare_with_source(folder, checkpoint, torch.device("cpu"), progress, model)
    return SourceCheck(found.figures(unknown=not known), tuple(found.differences))


def _check_same_shape(manifest: Manifest, checkpoint: Path | MiniGPT4Files) -> None:
    """Raise CheckpointError for a checkpoint whose architecture or sizes are not the engine's."""
    hf, layers = read_config(checkpoint), manifest.build.layers
    config = find_architecture(hf.get("architectures") or ()).read_config(hf)
    if layers is not None and layers[1] <= config.num_layers:
        config = config.cut(*layers)
    pairs = {name: (getattr(config, name), getattr(manifest.model, name)) for name in _SHAPE}
    odd = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if odd:
        raise CheckpointError(
            "the checkpoint is of another model than the engine",
            seen=", ".join(f"{name} {theirs}" for name, (theirs, _) in odd.items()),
            allowed=", ".join(f"{name} {ours}" for name, (_, ours) in odd.items()),
            field="source",
            fix="`source=CHECKPOINT`, the one that the engine was built from",
        )


@contextmanager
def _reading(manifest: Manifest, checkpoint: Path | MiniGPT4Files) -> Iterator[Source]:
    """The checkpoint's tensors by our names: by published names, else as its weight map reads them."""
    config, layers = manifest.model, manifest.build.layers
    if isinstance(checkpoint, MiniGPT4Files) or is_minigpt4(checkpoint):
        with PictureSource.open(checkpoint, config, layers) as source:
            yield source
        return
    if is_gguf(checkpoint):
        yield GgufSource(GgufFile.open(checkpoint), config, layers)
        return
    if SourceTensors.knows(config):
        with SourceTensors.open(checkpoint, config, layers) as source:
            yield source
        return
    with open_checkpoint(checkpoint) as opened:
        yield MappedSource(Assembly.of(opened, manifest.build, QuantConfig()), opened)


class _Check:
    """One comparison."""

    def __init__(
        self,
        manifest: Manifest,
        model: Decoder,
        reader: WeightsReader,
        source: Source,
        device: torch.device,
        found: Gathered,
    ) -> None:
        self._quant = manifest.quant
        self._linears = linears(model)
        wide = {name: p.dtype for name, p in model.named_parameters() if p.dtype == torch.float32}
        self._dtypes = {name: dtype for name, dtype in wide.items() if name.endswith("norm.weight")}
        self._tied = manifest.model.tie_word_embeddings
        self._halves = manifest.build.dtypes
        self._reader = reader
        self._source = source
        self._device = device
        self._origin = self._origin_of(manifest)
        self._found = found

    def _origin_of(self, manifest: Manifest) -> Origin:
        """Chosen by what the build's method changes before it rounds."""
        quant, config = manifest.quant, manifest.model
        if quant.rotation:
            return Rotated(self._read, config, self._device)
        if quant.in_blocks:
            free = {name for name, one in self._linears.items() if one.scheme.form == "blocks"}
            free -= {name for name in free if self._linears[name].scheme.ordered}
            return Reordered(self._read, config, self._weight, free.__contains__, self._device)
        if quant.method not in ("awq", "smoothquant"):
            return Origin(self._read)
        taken = {name for name in self._linears if name != HEAD and quant.at(name).method == quant.method}
        # SmoothQuant multiplies columns by what a norm was really divided by.
        coarse = max(torch.finfo(parse_dtype(one)).eps for one in astuple(self._halves))
        unit = _FLOAT if quant.method == "smoothquant" else 0.51 * coarse
        # Tensors of the checkpoint are in the dtype that they have before a method changes them.
        dtypes, half = self._dtypes, self._half
        return Folded(
            lambda module, leaf: self._read(module, leaf).to(dtypes.get(f"{module}.{leaf}", half(module))),
            config,
            self._weight,
            lambda module: plain_scales(self._linears[module], self._leaves(module), self._device),
            self._stored_leaf,
            taken.__contains__,
            unit,
            self._device,
        )

    def _half(self, module: str) -> torch.dtype:
        """The dtype of a module's half."""
        return parse_dtype(self._halves.at(module))

    def _stored_leaf(self, module: str, leaf: str) -> torch.Tensor:
        return self._reader.read(f"{module}.{leaf}")

    def _weight(self, module: str) -> torch.Tensor:
        """A linear layer's weight as the stored values mean it."""
        return plain_weight(self._linears[module], self._leaves(module), self._device)

    def _leaves(self, module: str) -> dict[str, torch.Tensor]:
        leaves = [leaf for leaf in self._linears[module]._parameters if leaf != "bias"]
        return {leaf: self._stored_leaf(module, leaf) for leaf in leaves}

    def module(self, one: StoringModule) -> None:
        linear = one.module
        narrow = isinstance(linear, Linear) and not linear.scheme.dense
        for leaf in one.leaves:
            if leaf == "bias" or not narrow:
                self._copied(one.path, leaf)
        if narrow:
            assert isinstance(linear, Linear)
            self._narrow(one, linear)

    def _read(self, module: str, leaf: str) -> torch.Tensor:
        """A tensor of the checkpoint; a tied head's is the embedding."""
        return self._source.read("embed_tokens" if module == HEAD and self._tied else module, leaf)

    def _copied(self, path: str, leaf: str) -> None:
        """Every value as the stored dtype rounds the checkpoint's, bit by bit unless it had to be derived."""
        rows = self._rows(path, leaf)
        if rows is not None:
            self._compare(f"{path}.{leaf}", rows, 0.0, exact=True)
            return
        known = self._origin.leaf(path, leaf)
        self._compare(f"{path}.{leaf}", known.tensor, known.rows, exact=known.exact)

    def _rows(self, path: str, leaf: str) -> Rows | None:
        """A tensor that is the checkpoint's, read some rows at a time where the source can."""
        if type(self._origin) is not Origin or not isinstance(self._source, GgufSource):
            return None
        return self._source.rows(path, leaf)

    def _compare(self, name: str, known: Rows, uncertain: Uncertain, *, exact: bool) -> None:
        """Stored values beside ``known`` ones, whose rows have relative errors."""
        got = self._reader.read(name)
        self._expect_shape(name, known, tuple(got.shape))
        worst, count, text = 0.0, 0, ""
        rows_at_once = max(_ROWS // max(got[:1].numel(), 1), 1)
        for start in range(0, len(got), rows_at_once):
            part, wanted = got[start : start + rows_at_once], known[start : start + rows_at_once]
            # What is equal is compared where it is: carrying it to a device would take longer.
            near = part.to(wanted.device)
            cast = wanted.to(near.dtype)
            if torch.equal(near, cast):
                continue
            rows = uncertain
            if not isinstance(rows, float):
                rows = rows[start : start + len(near)].view(-1, *[1] * (near.dim() - 1))
            off, size = (near.float() - wanted.float()).abs(), wanted.float().abs()
            shares = off / ((rows + torch.finfo(near.dtype).eps) * size + _FLOAT * size.max() + _TINY)
            wrong = near != cast if exact else ~(shares <= 1)
            worst = max(worst, float(shares.nan_to_num(nan=torch.inf).max()))
            count += int(wrong.sum())
            if bool(wrong.any()) and not text:
                place = int(wrong.flatten().nonzero()[0])
                text = f"{float(near.flatten()[place]):.6g} instead of {float(cast.flatten()[place]):.6g}"
        self._found.add("copied", name, {"copied": 0.0 if exact else worst})
        if count:
            where = f"{count} of {got.numel()} values are not the checkpoint's, the first is {text}"
            self._found.differences.append(SourceDifference(name, "copied", worst, where))

    def _narrow(self, one: StoringModule, linear: Linear) -> None:
        own = self._quant.at(one.path)
        packed = bool(self._quant.source) and self._source.is_packed(one.path)
        method = "stored" if packed else own.method or "round"
        tensors = {leaf: self._reader.read(f"{one.path}.{leaf}") for leaf in one.leaves if leaf != "bias"}
        known = self._origin.weight(one.path)
        name = f"{one.path}.weight"
        self._expect_shape(name, known.tensor, (linear.out_features, linear.in_features))
        if not packed and (known.exact or (method == "round" and not linear.scheme.packs_fp32)):
            known = known.cast(self._half(one.path))
        scales = "channel" if packed else own.weight_scales
        dtype = self._half(one.path)
        off = judge_narrow(linear, method, tensors, known, dtype, self._device, scales=scales)
        if packed and linear.scheme.static:
            scale, stored = float(tensors["input_scale"]), self._source.input_scale(one.path)
            off.add("input scale", torch.tensor([0.0 if scale == stored else torch.inf]))
        factors = self._origin.factors(one.path)
        if factors is not None:
            off.add("factor", factors)
        if "shift" in tensors:
            off.add("shift", self._shift(one, linear, tensors))
        self._found.add(f"{linear.scheme.name} {method}", name, off.shares)
        if off.error is not None:
            self._found.errors[one.path] = off.error
        for measure, share in off.shares.items():
            if not share <= 1:
                where = off.where(measure, linear.out_features)
                self._found.differences.append(SourceDifference(name, measure, share, where))

    def _shift(self, one: StoringModule, linear: Linear, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Shares [N] of the limit by which RPTQ's shift is not what zeros add, with the bias."""
        columns = torch.arange(linear.in_features)
        block = -(-tensors["weight"].shape[1] // len(tensors["zeros"]))
        zeros = (tensors["steps"].double() * tensors["zeros"].double())[columns // block]
        values = tensors["weight"][:, : linear.in_features].double() * tensors["scales"].double()[:, None]
        bias = self._stored_leaf(one.path, "bias").double() if linear.has_bias else torch.zeros(1).double()
        off = (tensors["shift"].double() - bias + values @ zeros).abs()
        return (off / (_FLOAT * (values.abs() @ zeros.abs() + bias.abs()) + _TINY)).float()

    def _expect_shape(self, name: str, tensor: Rows, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} has another shape in the checkpoint",
                seen=list(tensor.shape),
                allowed=list(shape),
                field="source",
                fix="`source=CHECKPOINT`, the one that the engine was built from",
            )
