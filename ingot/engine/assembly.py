"""From a checkpoint's tensors to an engine's, one at a time: architecture, names, dtype, packing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ingot.checkpoint.checkpoint_reader import GENERATION_CONFIG, Checkpoint
from ingot.checkpoint.packed_tensors import PackedLayers
from ingot.checkpoint.weight_map import Ignore, MappedTensor, resolve, stored_copies
from ingot.config.build_config import DEFAULT_MAX_SEQ_LEN, BuildConfig, parse_layers
from ingot.config.decoder_config import DecoderConfig
from ingot.config.half_dtypes import AUTO, HalfDtypes
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import HEAD, QuantConfig
from ingot.device import dtype_name, parse_dtype
from ingot.engine.as_stored import StoredWeights, replaces_stored, stored_note, stored_quant
from ingot.engine.asked_dtypes import read_dtypes
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest
from ingot.errors import BuildError, ConfigError
from ingot.layers.decoder import Decoder
from ingot.layers.linear import Linear, linears
from ingot.layers.norm import is_wide
from ingot.models.architecture import Architecture
from ingot.models.hf_values import check_end_tokens
from ingot.models.model_registry import architecture_named, can_calibrate, find_architecture
from ingot.quant.methods.rotated_weights import rotated
from ingot.quant.quantized_values import Values
from ingot.version import VERSION

Load = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ChosenValues:
    """What a linear layer stores besides its rounded weight.

    Attributes:
        values: quantized values that are already chosen; None: the scheme rounds the weight.
        input_scale: fp32 [1], of static activations.
    """

    values: Values | None = None
    input_scale: torch.Tensor | None = None


ROUNDED = ChosenValues()
Choose = Callable[[str], ChosenValues]  # of a linear layer by its name
# What is calibrated together: a layer of a stack, or what joins an encoder to the decoder.
_LAYER = re.compile(r"(encoder\.(\w+\.)?)?layers\.\d+|encoder\.projector")


@dataclass
class Assembly:
    """An engine's configs, an empty model of its shape, and where each tensor comes from."""

    architecture: Architecture
    model_config: DecoderConfig
    build: BuildConfig
    quant: QuantConfig
    model: Decoder
    mapped: dict[str, MappedTensor]
    source_dtype: str
    packed: PackedLayers | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, build: BuildConfig, quant: QuantConfig) -> Assembly:
        """Plan the assembly; reads no weights but a head that may be tied.

        Raises:
            CheckpointError: unsupported architecture or config, an end token outside the vocabulary, or
                tensors that do not fit the model (all listed).
            ConfigError: ``layers``, ``max_seq_len`` or patterns of ``quant`` do not fit the model, the
                checkpoint is quantized differently, or ``quant`` calibrates a model whose encoder is not of
                speech.
        """
        architecture = find_architecture(checkpoint.config.get("architectures") or ())
        whole = architecture.read_config(checkpoint.config)
        if whole.tie_word_embeddings:
            # Often left at a default when a fine-tune unties the two; the stored head was trained, and
            # transformers 5 uses it.
            names = stored_copies(architecture.weight_map(whole, None), checkpoint.tensors)
            pairs = ((checkpoint.read(one), checkpoint.read(other)) for one, other in names)
            tied = all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)
            whole = whole.replace(tie_word_embeddings=tied)
        check_end_tokens(checkpoint.generation_config, whole.vocab_size, GENERATION_CONFIG)
        if architecture.check_generation is not None:
            architecture.check_generation(checkpoint.generation_config, whole.vocab_size)
        check_max_seq_len(whole, build)
        config = whole
        if build.layers is not None:
            start, end = build.layers
            if end > whole.num_layers:
                raise ConfigError(
                    "the model has fewer layers",
                    seen=f"{start}:{end}",
                    allowed=f"0:{whole.num_layers}",
                    field="layers",
                )
            config = whole.cut(start, end)
        check_samples(config, quant)
        shapes = architecture.empty_model(config, build, QuantConfig())
        weight_map = architecture.weight_map(whole, build.layers)  # type: ignore[arg-type]
        packed = checkpoint.packed
        if packed is not None and replaces_stored(packed.form, quant):
            packed = None
        if packed is not None:
            idle = tuple(Ignore(name) for name in packed.idle_biases())
            weight_map = replace(weight_map, rules=(*weight_map.rules, *idle))
        mapped = {m.target: m for m in resolve(weight_map, checkpoint.tensors, logical_shapes(shapes))}
        if packed is not None:
            quant = stored_quant(packed, mapped, list(linears(shapes)), quant)
        quant.check_names(linears(shapes))
        model = architecture.empty_model(config, build, quant)
        dtypes = {dtype_name(info.default or info.dtype) for info in checkpoint.tensors.values()}
        return cls(architecture, config, build, quant, model, mapped, "+".join(sorted(dtypes)), packed)

    def notes(self, checkpoint: Checkpoint) -> Iterator[str]:
        """What of the checkpoint the engine does not have, or has in another form."""
        if self.architecture.text_config is not None and "text_config" in checkpoint.config:
            yield "the text half alone is built: this version reads no pictures for it"
        if (note := stored_note(checkpoint, self.quant, str(self.build.dtypes))) is not None:
            yield note

    def layout(self) -> dict[str, torch.Tensor]:
        """Meta tensors of all stored tensors by name, in order; a tied head is not among them."""
        return dict(self.model.named_parameters())

    def tensors(
        self, checkpoint: Checkpoint, device: torch.device | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every stored tensor, read, cast and packed, in the order of ``layout``.

        ``device``: where weights are rotated and rounded; the results are the same on any.
        """
        load: Load = partial(self.load, checkpoint=checkpoint, device=device)
        if self.packed is None:
            return packed_tensors(self.model, load, device)
        stored = StoredWeights(self.packed, self.mapped, self.build.dtypes)
        return packed_tensors(
            self.model, load, device, lambda name: ChosenValues(stored.values(name), stored.input_scale(name))
        )

    def load(self, target: str, checkpoint: Checkpoint, device: torch.device | None = None) -> torch.Tensor:
        """One tensor before packing, by the model's name: in the engine's dtype, or fp32 where it was rotated
        and its layer rounds its input to 8 bits. A rotated one is on ``device`` (None: the CPU), others on
        the CPU.
        """
        if not self.quant.rotation:
            return self.original(target, checkpoint)
        tensor = rotated(target, self.model_config, lambda name: self.mapped[name].load(checkpoint), device)
        return self.cast(target, tensor)

    def cast(self, target: str, tensor: torch.Tensor) -> torch.Tensor:
        """A changed tensor as it is packed: in fp32 where its scheme wants that, else in the engine's dtype.

        Raises:
            BuildError: the dtype does not hold it.
        """
        path, _, leaf = target.rpartition(".")
        module = self.model.get_submodule(path)
        wide = leaf == "weight" and isinstance(module, Linear) and module.scheme.packs_fp32
        return tensor.float() if wide else cast_weight(target, tensor, self.dtype_of(target))

    def original(self, target: str, checkpoint: Checkpoint) -> torch.Tensor:
        dtype = self.dtype_of(target)
        return cast_weight(target, self.mapped[target].load(checkpoint, dtype), dtype)

    def dtype_of(self, target: str) -> torch.dtype:
        """A tensor's dtype before packing: its half's, but fp32 for the weight of a wide norm."""
        module = self.model.get_submodule(target.rpartition(".")[0])
        return torch.float32 if is_wide(module) else parse_dtype(self.build.dtypes.at(target))


def check_samples(config: DecoderConfig, quant: QuantConfig) -> None:
    """Refuse to calibrate a model whose encoder takes neither text nor speech.

    Raises:
        ConfigError: ``quant`` does.
    """
    if quant.calibrated and not can_calibrate(config):
        raise ConfigError(
            "calibration reads text or speech, and this model's encoder takes neither",
            seen=quant.needs_samples,
            allowed="schemes without samples: w8a16, w4a16 or w8a8 by rounding, with dynamic activations",
            field="quant",
            fix="`quant`, without `method`, `activations` and `calib`",
        )


def cast_weight(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight in another dtype.

    Raises:
        BuildError: it overflows fp16.
    """
    cast = tensor.to(dtype)
    narrower = dtype == torch.float16 and tensor.dtype != dtype
    if narrower and not bool(torch.isfinite(cast).all()):
        raise BuildError(
            "weights do not fit fp16",
            seen=f"{name}: largest {tensor.abs().max():.4g}",
            fix="`dtype=bf16`",
        )
    return cast


def model_of(manifest: Manifest, plan: KernelPlan | None = None) -> Decoder:
    """The empty modules of an engine; without a plan kernels have their defaults."""
    architecture = architecture_named(manifest.model.architecture)
    return architecture.empty_model(manifest.model, manifest.build, manifest.quant, plan)


def packed_tensors(
    model: Decoder,
    load: Load,
    device: torch.device | None = None,
    choose: Choose = lambda name: ROUNDED,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every stored tensor in module order.

    ``load`` gives weights before packing, by name. Those that packing changes are packed on ``device``, if
    one is given.
    """
    for one in storing_modules(model):
        yield from one.packed(load, device, choose)


@dataclass(frozen=True)
class StoringModule:
    """A module with stored tensors, ``leaves``, and the name of the weight that a linear layer packs."""

    path: str
    module: nn.Module
    leaves: tuple[str, ...]
    weight: str

    @property
    def layer(self) -> str | None:
        return layer_of(self.path)

    def packed(
        self, load: Load, device: torch.device | None = None, choose: Choose = lambda name: ROUNDED
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Its stored tensors; arguments as of ``packed_tensors``."""
        if not isinstance(self.module, Linear):
            yield from ((f"{self.path}.{leaf}", load(f"{self.path}.{leaf}")) for leaf in self.leaves)
            return
        scheme, choice = self.module.scheme, choose(self.path)
        bias = load(f"{self.path}.bias") if self.module.has_bias else None
        if choice.values is not None:
            found = scheme.accept(choice.values, bias, choice.input_scale)
        else:
            weight = load(self.weight)
            if device is not None and not scheme.dense:
                weight = weight.to(device)
            found = scheme.pack(weight, bias, choice.input_scale)
        yield from ((f"{self.path}.{name}", tensor) for name, tensor in found.items())


def layer_of(name: str) -> str | None:
    """The layer of a module or tensor, in the decoder or its encoder; None: it is in none."""
    found = _LAYER.match(name)
    return None if found is None else found[0]


def storing_modules(model: Decoder) -> Iterator[StoringModule]:
    """The modules with stored tensors, in order."""
    stored = dict(model.named_parameters())
    for path, module in model.named_modules():
        leaves = tuple(leaf for leaf in module._parameters if f"{path}.{leaf}" in stored)
        # Tied, but stored in fewer bits; a rotated head is another matrix than the embedding.
        copied = path == HEAD and model.config.tie_word_embeddings and not model.quant.rotation
        if leaves:
            yield StoringModule(path, module, leaves, f"{'embed_tokens' if copied else path}.weight")


def logical_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """What a weight map must deliver: shapes before packing, tied weights included."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, Linear):
            shapes |= {f"{prefix}{name}": shape for name, shape in module.logical_shapes().items()}
        else:
            shapes |= {
                f"{prefix}{name}": tuple(p.shape) for name, p in module._parameters.items() if p is not None
            }
    return shapes


def check_max_seq_len(config: DecoderConfig, build: BuildConfig) -> None:
    """Raises:
    ConfigError: the build's ``max_seq_len`` exceeds the model's positions.
    """
    if build.max_seq_len > config.max_positions:
        raise ConfigError(
            "max_seq_len exceeds the model's context length",
            seen=build.max_seq_len,
            allowed=f"<= {config.max_positions}",
            field="max_seq_len",
            fix=f"`max_seq_len={config.max_positions}` or less: the model's context length is that of "
            "config.json (max_position_embeddings; of YaRN, original_max_position_embeddings times factor)",
        )


def build_config(
    source: Checkpoint,
    dtype: str,
    max_batch_size: int,
    max_seq_len: int | None,
    layers: str | tuple[int, int] | None,
) -> BuildConfig:
    """A build's values with every ``auto`` replaced by what the checkpoint says; ``dtype`` as of
    ``read_dtypes``.
    """
    config = find_architecture(source.config.get("architectures") or ()).read_config(source.config)
    dtypes = read_dtypes(dtype, config)
    if AUTO in (dtypes.decoder, dtypes.encoder):  # that of most weights
        counts: Counter[str] = Counter()
        for info in source.tensors.values():
            counts[dtype_name(info.default or info.dtype)] += math.prod(info.shape)
        best = max(counts, key=lambda name: counts[name], default="fp32")
        own = best if best in ("fp16", "bf16") else "fp32"
        dtypes = dtypes.or_else(HalfDtypes.of(own))
    if max_seq_len is None:
        max_seq_len = min(config.max_positions, DEFAULT_MAX_SEQ_LEN)
    kept = parse_layers(layers) if isinstance(layers, str) else layers
    return BuildConfig.of(dtypes, max_batch_size, max_seq_len, kept)


def make_manifest(assembly: Assembly, source: Checkpoint, text: TextParts) -> Manifest:
    """The manifest of an assembly, without the hashes that only writing gives."""
    return Manifest(
        ingot_version=VERSION,
        model=assembly.model_config,
        build=assembly.build,
        quant=assembly.quant,
        generation=source.generation_config,
        stop_ids=text.stop_ids,
        chat_template=text.chat_template,
        source_dtype=assembly.source_dtype,
    )
