"""A quantized engine's weights as a checkpoint in its original's format.

Covers the way back through the weight map: each source of a linear layer gets its part of what the engine's
quantized values mean, unpacked by code that engines do not compute with (source/narrow.py); other tensors of
a layer are the engine's where the build changed them (rescaling.py), and all else stays the original's,
rounded to the dtype that the engine stores. The files are in fp32, the dtype that a reader then takes the
checkpoint to be of. So whatever reads the original can compute with the engine's weights.

    folder = write_dequantized(Path("engine"), Path("checkpoint"), Path("out"))
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ingot.building.source.quantized_check import plain_weight
from ingot.checkpoint.checkpoint_files import CONFIG, list_files, read_json
from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.checkpoint_writer import write_tensors
from ingot.checkpoint.hub import small_files
from ingot.checkpoint.name_rules import Concat, SplitRule, Transpose
from ingot.checkpoint.packed_config import PACKED_CONFIGS, PACKED_KEYS
from ingot.checkpoint.weight_map import MappedTensor
from ingot.config.quantization.quant_config import HEAD
from ingot.engine.assembly import Assembly, layer_of
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.engine.weights_file import WeightsReader
from ingot.errors import CheckpointError
from ingot.layers.linear import Linear, linears


def write_dequantized(engine: Path, checkpoint: Path, folder: Path) -> Path:
    """Write the checkpoint; returns ``folder``. Configs and tokenizer files are copied.

    It takes 4 bytes of disk a value. A head that is tied in the original and stored in fewer bits, or
    rotated, becomes a tensor of its own.

    Args:
        engine: an engine folder.
        checkpoint: what it was built from.

    Raises:
        CheckpointError, EngineError: one of them cannot be read, or they do not belong together.
    """
    manifest = Manifest.read(engine)
    folder.mkdir(parents=True)
    own_head = manifest.quant.head != "none" or manifest.quant.rotation
    untied = manifest.model.tie_word_embeddings and bool(own_head)
    _copy_files(checkpoint, folder, untied=untied)
    with open_checkpoint(checkpoint) as source:
        assembly = Assembly.of(source, manifest.build, manifest.quant)
        write_tensors(_tensors(assembly, WeightsReader(engine / WEIGHTS_FILE), source), folder)
    return folder


def _copy_files(checkpoint: Path, folder: Path, *, untied: bool) -> None:
    for name in small_files(list_files(checkpoint)):
        if name not in PACKED_CONFIGS and not name.endswith(".index.json"):
            shutil.copyfile(checkpoint / name, folder / name)
    config = read_json(folder / CONFIG)
    changed = {key: value for key, value in config.items() if key not in PACKED_KEYS}
    changed |= {"tie_word_embeddings": False} if untied else {}
    if changed != config:
        (folder / CONFIG).write_text(json.dumps(changed), encoding="utf-8")


def _tensors(
    assembly: Assembly, reader: WeightsReader, source: Checkpoint
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, those of layers in fewer bits dequantized."""
    narrow = {name: m for name, m in linears(assembly.model).items() if not m.scheme.dense}
    mapped = {name: assembly.mapped[f"{name}.weight"] for name in narrow}
    changed = list(_changed(assembly, reader, source))
    replaced = {part for one in mapped.values() if not _copied(one) for part in one.sources}
    replaced |= {part for one in changed if not _copied(one) for part in one.sources}
    if source.packed is not None:
        used = {part for one in assembly.mapped.values() for part in one.sources}
        replaced |= {name for name in source.packed.idle_biases() if name not in used}
    dtypes = {part: assembly.dtype_of(one.target) for one in assembly.mapped.values() for part in one.sources}
    for name in source.tensors:
        if name not in replaced:
            tensor = source.read(name)
            floating = tensor.is_floating_point()
            yield name, tensor.to(dtypes.get(name, torch.float32)).float() if floating else tensor
    for one in changed:
        yield from _restored(one, reader.read(one.target).float(), source)
        reader.release()
    for name, linear in narrow.items():
        yield from _restored(mapped[name], _dequantized(name, linear, reader), source)
        reader.release()


def _changed(assembly: Assembly, reader: WeightsReader, source: Checkpoint) -> Iterator[MappedTensor]:
    """Tensors stored whole that are not the original's in the engine's dtype: of layers, of a rotated model
    also others.
    """
    narrow = {f"{name}.weight" for name, m in linears(assembly.model).items() if not m.scheme.dense}
    for name in assembly.layout():
        one = assembly.mapped.get(name)
        fixed = layer_of(name) is None and not assembly.quant.rotation
        if one is None or name in narrow or fixed:
            continue
        if not torch.equal(reader.read(name), assembly.original(name, source)):
            yield one
        reader.release()


def _restored(
    mapped: MappedTensor, tensor: torch.Tensor, source: Checkpoint
) -> Iterator[tuple[str, torch.Tensor]]:
    """The sources of one of the engine's tensors, by their names; a head that was tied has its own."""
    if _copied(mapped):
        yield f"{HEAD}.weight", tensor
        return
    shapes = [tuple(source.tensors[part].shape) for part in mapped.sources]
    yield from zip(mapped.sources, _parts(mapped, tensor, shapes), strict=True)


def _copied(mapped: MappedTensor) -> bool:
    """Whether a tensor is the head of a model whose head is its embedding."""
    return mapped.target == f"{HEAD}.weight" and mapped.tied_to is not None


def _dequantized(name: str, linear: Linear, reader: WeightsReader) -> torch.Tensor:
    leaves = [leaf for leaf in linear._parameters if leaf != "bias"]
    tensors = {leaf: reader.read(f"{name}.{leaf}") for leaf in leaves}
    return plain_weight(linear, tensors, torch.device("cpu"))


def _parts(
    mapped: MappedTensor, weight: torch.Tensor, shapes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """The sources that the mapping's rule makes ``weight`` of.

    Raises:
        CheckpointError: the rule takes a part of its source, which is not put together again.
    """
    rule = mapped.rule
    if isinstance(rule, SplitRule):
        raise CheckpointError("a split tensor cannot be reassembled", seen=mapped.sources)
    if isinstance(rule, Concat):
        sizes, (place, gap) = [shape[rule.dim] for shape in shapes], rule.gap
        if gap:
            sizes.insert(place, gap)
        parts = list(weight.split(sizes, rule.dim))
        return parts[:place] + parts[place + 1 :] if gap else parts
    return [weight.t() if isinstance(rule, Transpose) else weight]
