"""What an engine, a checkpoint, a config.json or a model on the hub asks of memory; reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from ingot.building.random_weights import config_manifest
from ingot.checkpoint.checkpoint_files import CONFIG, read_json
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.gguf.gguf_file import is_gguf
from ingot.checkpoint.hub import local_path, resolve_config
from ingot.checkpoint.minigpt4_files import is_minigpt4
from ingot.checkpoint.openai_whisper import is_openai
from ingot.checkpoint.packed_config import PACKED_CONFIGS, packed_files, packed_format
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE
from ingot.config.half_dtypes import AUTO, HalfDtypes
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.as_stored import expect_stored
from ingot.engine.asked_dtypes import read_dtypes
from ingot.engine.assembly import Assembly, build_config, check_max_seq_len, check_samples, model_of
from ingot.engine.engine_loader import setting_of
from ingot.engine.manifest import Manifest, is_engine
from ingot.errors import CheckpointError
from ingot.layers.linear import linears
from ingot.memory.ledger import MemorySetting


def read_setting(
    name: str,
    *,
    dtype: str = "auto",
    quant: str | QuantConfig | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    runtime: RuntimeConfig | None = None,
    revision: str | None = None,
) -> MemorySetting:
    """What an engine folder, a checkpoint folder, a config.json or a Hugging Face id asks for.

    Of an id only config.json is downloaded. A limit that is not given is an engine's own, or a build's
    default; an engine's may be changed too, as a build would. A CPU computes in fp32 unless ``dtype`` says
    otherwise.

    Raises CheckpointError or EngineError where there is no such thing, ConfigError for a value out of range,
    or an embedding on the host that is also the head.
    """
    manifest = _manifest(name, dtype, max_batch_size, max_seq_len, revision)
    changes = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
    build = manifest.build.replace(**{key: value for key, value in changes.items() if value is not None})
    check_max_seq_len(manifest.model, build)
    own = HalfDtypes.of("fp32") if device == "cpu" else build.dtypes
    dtypes = read_dtypes(dtype, manifest.model).or_else(own)
    asked = manifest.quant
    if quant is not None:
        asked = read_quant(quant)
        if manifest.quant.source:
            asked = expect_stored(manifest.quant, asked)
        else:
            check_samples(manifest.model, asked)
            asked.check_names(linears(model_of(manifest)))
    return setting_of(manifest.replace(build=build, quant=asked), dtypes, torch.device(device), runtime)


def _manifest(
    name: str, dtype: str, max_batch_size: int | None, max_seq_len: int | None, revision: str | None
) -> Manifest:
    """The manifest of an engine, or of what a build would make: quantization and head follow the tensors
    where they are, else the config.
    """
    path = local_path(name)
    if is_engine(path):
        return Manifest.read(path)
    place = path if path.is_file() else resolve_config(name, revision=revision)
    batch = DEFAULT_MAX_BATCH_SIZE if max_batch_size is None else max_batch_size
    manifest = config_manifest(place, _stored_dtype(place, dtype), batch, max_seq_len)
    if is_gguf(place):
        with open_checkpoint(place) as source:
            made = Assembly.of(source, manifest.build, QuantConfig())
        return manifest.replace(model=made.model_config, quant=made.quant)
    if is_openai(place) or is_minigpt4(place):
        return manifest
    folder, config = (place.parent, place) if place.is_file() else (place, place / CONFIG)
    beside = packed_files(folder, [name for name in PACKED_CONFIGS if (folder / name).is_file()])
    form = packed_format(read_json(config), beside)
    if form is None and not manifest.model.tie_word_embeddings:
        return manifest
    try:
        with open_checkpoint(folder) as source:
            made = Assembly.of(source, manifest.build, QuantConfig())
            return manifest.replace(model=made.model_config, quant=made.quant)
    except CheckpointError:  # no weights here
        return (
            manifest if form is None else manifest.replace(quant=expect_stored(form.quant(), QuantConfig()))
        )


def _stored_dtype(folder: Path, dtype: str) -> str:
    """The dtype of a build: that of the weights where they are, else what config.json says."""
    alone = is_openai(folder) or is_minigpt4(folder) or is_gguf(folder)
    if (dtype != AUTO and "=" not in dtype) or (folder.is_file() and not alone):
        return dtype
    try:
        with open_checkpoint(folder) as source:
            return str(build_config(source, dtype, 1, 1, None).dtypes)
    except CheckpointError:  # no weights here: the config is enough
        return dtype
