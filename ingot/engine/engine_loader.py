"""Loads an engine folder or a checkpoint as a model on a device."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE
from ingot.config.half_dtypes import HalfDtypes
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.config.quantization.scheme_table import floating_schemes
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import dtype_name, expect_capability, expect_fp8_products, parse_dtype
from ingot.engine.asked_dtypes import dtypes_of, read_dtypes
from ingot.engine.assembly import Assembly, build_config, cast_weight, make_manifest, model_of
from ingot.engine.engine_text import TextParts, read_engine_text, read_text_parts
from ingot.engine.integrity import checked_weights
from ingot.engine.manifest import Manifest
from ingot.engine.plan_file import plan_here
from ingot.engine.proof_file import read_proof
from ingot.errors import ConfigError
from ingot.layers.decoder import Decoder
from ingot.layers.embedding import pinned
from ingot.layers.linear import loaded_dtype, narrower
from ingot.memory.ledger import MemorySetting, expect_own_embedding
from ingot.memory.memory_error import explained

_log = logging.getLogger(__name__)
_OF_CPU = "fp32"
NO_ROOM = "the weights do not fit in the device's memory"


@dataclass
class Engine:
    """A model ready to run, with the plan that is used and the dtype of its arithmetic; an encoder's is in
    ``dtypes``, too.
    """

    manifest: Manifest
    model: Decoder
    text: TextParts
    plan: KernelPlan
    device: torch.device
    dtype: torch.dtype

    @property
    def dtypes(self) -> HalfDtypes:
        """Of the arithmetic of both halves."""
        encoder = None if self.model.encoder is None else dtype_name(self.model.encoder_dtype)
        return HalfDtypes.of(dtype_name(self.dtype), encoder)


def expect_schemes(quant: QuantConfig, device: torch.device) -> None:
    """Raise DeviceError on a GPU that is too old for one of the layers' schemes."""
    for scheme in floating_schemes():
        if scheme in quant.schemes:
            expect_fp8_products(device, scheme)


def compute_dtypes(manifest: Manifest, device: torch.device, name: str = "auto") -> HalfDtypes:
    """The dtypes of arithmetic: ``auto`` is the engine's own on a GPU, and fp32 on a CPU, which widens 16-bit
    weights exactly and whose 16-bit arithmetic is slower and rounds more. ``name`` as of ``read_dtypes``.
    Raises DeviceError on a GPU that is too old.
    """
    expect_capability(device)
    expect_schemes(manifest.quant, device)
    own = HalfDtypes.of(_OF_CPU) if device.type == "cpu" else manifest.build.dtypes
    return read_dtypes(name, manifest.model).or_else(own)


def setting_of(
    manifest: Manifest,
    dtype: torch.dtype | HalfDtypes,
    device: torch.device,
    runtime: RuntimeConfig | None = None,
) -> MemorySetting:
    """An engine's setting for the memory ledger; ``runtime`` None: the defaults. Raises ConfigError where an
    embedding that is the head is to stay on the host.
    """
    build = manifest.build
    dtypes = dtypes_of(dtype)
    setting = MemorySetting(
        manifest.model,
        dtypes.decoder,
        build.max_batch_size,
        build.max_seq_len,
        stored_dtype=build.dtype,
        encoder_dtype=dtypes.other,
        stored_encoder_dtype=build.encoder_dtype,
        device="cuda" if device.type == "cuda" else "cpu",
        quant=manifest.quant,
        runtime=(runtime or RuntimeConfig()).of_engine(build.kv_dtype),
    )
    expect_own_embedding(setting)
    return setting


def lowered(
    manifest: Manifest, max_batch_size: int | None = None, max_seq_len: int | None = None
) -> Manifest:
    """The manifest with lower limits, as if it had been built with them; None: the built ones.

    Raises:
        ConfigError: a limit is larger than what was built, or below 1.
    """
    built = manifest.build
    wanted = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
    build = built.replace(**{name: value for name, value in wanted.items() if value is not None})
    for name in wanted:
        most, value = getattr(built, name), getattr(build, name)
        if value > most:
            raise ConfigError(
                f"the engine was built for a smaller {name}",
                seen=value,
                allowed=f"<= {most}",
                field=name,
                fix=f"`{name}`, or rebuild with a larger limit",
            )
    return manifest.replace(build=build)


def load_engine(
    folder: Path,
    device: torch.device,
    dtype: str = "auto",
    *,
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    runtime: RuntimeConfig | None = None,
) -> Engine:
    """Load an engine folder.

    A kernel plan that was measured on another machine is not used, and a warning is logged. A CPU uses none.

    Args:
        max_batch_size, max_seq_len: lower limits than the build's, for this process.
        runtime: what the engine will run with, for the ledger of an out-of-memory error.

    Raises:
        ConfigError: as ``lowered``.
        EngineError: the folder is no engine; a tensor or file is not the one that was built (by its hash), or
            not in the manifest; the proof is damaged or of another manifest; the kernel plan was changed, or
            cannot be read on a GPU.
        OutOfMemoryError: the device cannot hold the weights.
    """
    manifest = lowered(Manifest.read(folder), max_batch_size, max_seq_len)
    compute = compute_dtypes(manifest, device, dtype)
    text = read_engine_text(folder, manifest)
    plan = plan_here(folder, device, parse_dtype(compute.decoder))
    model = model_of(manifest, plan)
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    with checked_weights(folder, manifest, expected) as read:
        read_proof(folder)  # it names the hash of the manifest
        stored = ((name, read(name)) for name in expected)
        with explained(NO_ROOM, setting_of(manifest, compute, device, runtime), device, own=0):
            fill(model, stored, device, compute, runtime)
    return Engine(manifest, model, text, plan, device, parse_dtype(compute.decoder))


def engine_in_memory(
    folder: Path,
    device: torch.device,
    dtype: str = "auto",
    *,
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
    layers: str | None = None,
    quant: str | QuantConfig | None = None,
    chat_template: str | None = None,
    tokenizer: str | Path | None = None,
    runtime: RuntimeConfig | None = None,
) -> Engine:
    """Assemble a checkpoint folder or GGUF file directly on a device; nothing is written. ``runtime`` as in
    ``load_engine``,
    ``quant`` and ``tokenizer`` as in ``build``; weights are packed on the device, one after another.

    Raises:
        CheckpointError: as ``build`` does.
        ConfigError: ``quant`` has a method that calibrates.
        OutOfMemoryError: the device cannot hold the weights.
    """
    with open_checkpoint(folder) as source:
        batch = DEFAULT_MAX_BATCH_SIZE if max_batch_size is None else max_batch_size
        config = build_config(source, "auto", batch, max_seq_len, layers)
        chosen = read_quant(quant)
        chosen.check_in_memory()
        assembly = Assembly.of(source, config, chosen)
        for note in assembly.notes(source):
            _log.warning("%s: %s", folder, note)
        vocab_size = assembly.model_config.vocab_size
        text = read_text_parts(source, chat_template, tokenizer, vocab_size)
        for note in text.notes(vocab_size):
            _log.warning("%s: %s", folder, note)
        manifest = make_manifest(assembly, source, text)
        compute = compute_dtypes(manifest, device, dtype)
        with explained(NO_ROOM, setting_of(manifest, compute, device, runtime), device, own=0):
            fill(assembly.model, assembly.tensors(source, device), device, compute, runtime)
    return Engine(manifest, assembly.model, text, KernelPlan(), device, parse_dtype(compute.decoder))


def fill(
    model: Decoder,
    tensors: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    dtypes: HalfDtypes,
    runtime: RuntimeConfig | None = None,
) -> None:
    """Put weights into an empty model, cast to the dtype of their half unless their scheme has its own; of a
    GPU's model the embedding goes where ``runtime`` keeps it. On a CPU the embedding and dense weights keep
    16 bits (cpu_weights.py).
    """
    on_host = device.type == "cuda" and runtime is not None and runtime.embedding == "host"
    model.encoder_dtype = parse_dtype(dtypes.encoder)
    for name, tensor in tensors:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        compute, narrow = parse_dtype(dtypes.at(name)), device.type == "cpu"
        wanted = loaded_dtype(module, leaf, tensor.dtype, compute, narrow=narrow)
        if module is model.embed_tokens:
            own_dtype = narrower(tensor.dtype, compute) if narrow else wanted
            model.embed_tokens.computes_in = None if own_dtype == wanted else wanted
            wanted = own_dtype
        if on_host and module is model.embed_tokens:
            own = pinned(cast_weight(name, tensor, wanted))
        else:
            own = cast_weight(name, tensor.to(device=device, copy=True), wanted)
        setattr(module, leaf, nn.Parameter(own, requires_grad=False))
    model.tie()
    if model.rotary is not None:
        model.rotary.to(device)
    model.eval()
