"""A config.json → an engine with random weights, for measuring a shape that has no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ingot.checkpoint.checkpoint_reader import read_config
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_SEQ_LEN, BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.half_dtypes import HalfDtypes
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import dtype_name, on_device, parse_dtype
from ingot.engine.asked_dtypes import dtypes_of, read_dtypes
from ingot.engine.assembly import ChosenValues, check_max_seq_len, logical_shapes, packed_tensors
from ingot.engine.engine_loader import NO_ROOM, Engine, compute_dtypes, fill, setting_of
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest
from ingot.layers.decoder import Decoder
from ingot.layers.linear import linears
from ingot.memory.memory_error import explained
from ingot.models.model_registry import architecture_named, find_architecture
from ingot.version import VERSION

STD = 0.02  # of weights and biases, as models are initialised; norms get ones


def engine_from_config(
    config: Path,
    device: torch.device,
    dtype: str = "auto",
    *,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    max_seq_len: int | None = None,
    quant: str | QuantConfig | None = None,
    seed: int = 0,
    runtime: RuntimeConfig | None = None,
) -> Engine:
    """An engine of a config's shape with normally distributed weights (standard deviation 0.02).

    Args:
        config: a Hugging Face config.json, or the folder that holds one.
        dtype: ``fp16``, ``bf16``, ``fp32``, or ``auto``: the config's own, fp16 where it names none. On a CPU
            the arithmetic is fp32 then.
        max_seq_len: None: the model's own, at most 8192.
        quant: as of ``build``; None: whole weights.
        runtime: as in ``load_engine``.

    Raises:
        CheckpointError: the config cannot be read, or its architecture is unknown.
        ConfigError: a limit is out of range.
        OutOfMemoryError: the device cannot hold the weights.
    """
    manifest = config_manifest(config, dtype, max_batch_size, max_seq_len, quant)
    if not manifest.quant.in_blocks:  # whose values are drawn, as the weights are
        manifest.quant.check_in_memory()
    arithmetic = compute_dtypes(manifest, device, dtype)
    plan = KernelPlan()
    model = random_decoder(
        manifest.model, manifest.build, plan, device, arithmetic, seed, runtime, manifest.quant
    )
    computing = parse_dtype(arithmetic.decoder)
    return Engine(manifest, model, TextParts(None, None, ()), plan, device, computing)


def config_manifest(
    config: Path,
    dtype: str,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    max_seq_len: int | None = None,
    quant: str | QuantConfig | None = None,
) -> Manifest:
    """What an engine of a config.json's shape would be; arguments and errors as of ``engine_from_config``."""
    hf = read_config(config)
    model = find_architecture(hf.get("architectures") or ()).read_config(hf)
    longest = min(model.max_positions, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    named = hf.get("dtype") or hf.get("torch_dtype") or "fp16"
    own = HalfDtypes.of(dtype_name(parse_dtype(named)))
    build = BuildConfig.of(read_dtypes(dtype, model).or_else(own), max_batch_size, longest)
    check_max_seq_len(model, build)
    return Manifest(VERSION, model, build, read_quant(quant), source_dtype=build.dtype)


def random_decoder(
    config: DecoderConfig,
    build: BuildConfig,
    plan: KernelPlan,
    device: torch.device,
    dtype: torch.dtype | HalfDtypes,
    seed: int = 0,
    runtime: RuntimeConfig | None = None,
    quant: QuantConfig | None = None,
) -> Decoder:
    """A decoder of this shape with random weights, drawn in the build's dtype, then cast to ``dtype``.

    Raises OutOfMemoryError where the device cannot hold them.
    """
    quant = quant or QuantConfig()
    model = architecture_named(config.architecture).empty_model(config, build, quant, plan)
    quant.check_names(linears(model))
    setting = setting_of(Manifest(VERSION, config, build, quant), dtype, device, runtime)
    with on_device(device), explained(NO_ROOM, setting, device, own=0):
        fill(model, random_tensors(model, device, build.dtypes, seed), device, dtypes_of(dtype), runtime)
    return model


def random_tensors(
    model: Decoder, device: torch.device, dtypes: HalfDtypes, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every stored tensor, of normally distributed weights and norms of ones, packed on the device."""
    shapes, layers = logical_shapes(model), linears(model)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str) -> torch.Tensor:
        tensor = torch.empty(shapes[name], dtype=parse_dtype(dtypes.at(name)), device=device)
        if tensor.dim() == 1 and name.endswith("weight"):
            return tensor.fill_(1.0)
        return tensor.normal_(std=STD, generator=generator)

    def drawn(name: str) -> ChosenValues:
        linear = layers[name]
        return ChosenValues(linear.scheme.drawn(linear.out_features, linear.in_features, STD, generator))

    return packed_tensors(model, draw, choose=drawn)
