"""A quantized engine's weights as a checkpoint in its original's format, for whatever reads the original.

Each source of a linear layer gets its part of what the engine's quantized values mean, unpacked by code that
engines do not compute with (source/plain_readings.py); other tensors of a layer are the engine's where the
build changed them (rescaling.py), and all others the original's, rounded to the dtype that the engine stores.
The files are in fp32, the dtype that a reader then takes the checkpoint to be of.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from ingot.building.source.quantized_check import plain_weight
from ingot.checkpoint.checkpoint_files import CONFIG, list_files, read_json, small_files
from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.checkpoint_writer import write_tensors
from ingot.checkpoint.name_rules import Concat, SplitRule, Transpose
from ingot.checkpoint.packed_config import PACKED_CONFIGS, PACKED_KEYS
from ingot.checkpoint.weight_map import MappedTensor
from ingot.config.quantization.quant_config import HEAD
from ingot.engine.assembly import Assembly, layer_of
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.engine.weights_file import WeightsReader
from ingot.errors import CheckpointError
from ingot.layers.linear import linears


def write_dequantized(engine: Path, checkpoint: Path, folder: Path) -> Path:
    """Write an engine's weights as the ``checkpoint`` that it was built from; returns ``folder``.

    It takes 4 bytes of disk per value. A head that is tied in the original and stored in fewer bits, or
    rotated, becomes a tensor of its own. Configs and tokenizer files are copied.
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
    changed = []  # stored whole, but not the original's: of layers, of a rotated model also others
    for name in assembly.layout():
        one = assembly.mapped.get(name)
        fixed = layer_of(name) is None and not assembly.quant.rotation
        if one is None or name.removesuffix(".weight") in narrow or fixed:
            continue
        if not torch.equal(reader.read(name), assembly.original(name, source)):
            changed.append(one)
        reader.release()
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
        leaves = [leaf for leaf in linear._parameters if leaf != "bias"]
        tensors = {leaf: reader.read(f"{name}.{leaf}") for leaf in leaves}
        meant = plain_weight(linear, tensors, torch.device("cpu"))
        yield from _restored(mapped[name], meant, source)
        reader.release()


def _restored(
    mapped: MappedTensor, tensor: torch.Tensor, source: Checkpoint
) -> Iterator[tuple[str, torch.Tensor]]:
    """The sources of one of the engine's tensors, by their names; a head that was tied has its own.

    Raises CheckpointError where a rule takes a part of its source, which is not put together again.
    """
    if _copied(mapped):
        yield f"{HEAD}.weight", tensor
        return
    rule = mapped.rule
    if isinstance(rule, SplitRule):
        raise CheckpointError("a split tensor cannot be reassembled", seen=mapped.sources)
    parts = [tensor.t() if isinstance(rule, Transpose) else tensor]
    if isinstance(rule, Concat):
        sizes = [source.tensors[part].shape[rule.dim] for part in mapped.sources]
        place, gap = rule.gap
        if gap:
            sizes.insert(place, gap)
        parts = list(tensor.split(sizes, rule.dim))
        parts = parts[:place] + parts[place + 1 :] if gap else parts
    yield from zip(mapped.sources, parts, strict=True)


def _copied(mapped: MappedTensor) -> bool:
    """Whether a tensor is the head of a model whose head is its embedding."""
    return mapped.target == f"{HEAD}.weight" and mapped.tied_to is not None
