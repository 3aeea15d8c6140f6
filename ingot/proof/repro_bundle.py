"""A repro bundle: one layer with its inputs, outputs and weights as a safetensors file.

Tensors: ``weights.<name within the layer>``, ``input.hidden``, ``input.positions``, ``input.rope_rows``,
``output``, ``expected``, and for a layer with cross-attention ``input.encoded``. The metadata key
``ingot_repro`` has ``BundleFacts`` as JSON.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig
from ingot.config.files.atomic_write import atomic_file
from ingot.config.files.json_text import parse_json
from ingot.config.json_config import JsonConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.modality import TEXT, modality_named
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import parse_dtype
from ingot.engine.reference_encoder import stage_names
from ingot.errors import BuildError, ConfigError, EngineError, IngotError, NoSuchPathError
from ingot.models.model_registry import plain_encoder
from ingot.reference.plain_stage import LayerShape
from ingot.runtime.step.one_layer import LayerInputs

BUNDLE_VERSION = 2
DECODER, ENCODER = "decoder", "encoder"
_KEY = "ingot_repro"
_WEIGHTS = "weights."
_ANOTHER = "`run` with a file that `ingot repro` wrote"


@dataclass(frozen=True)
class BundleFacts(JsonConfig):
    """What a bundle says of itself.

    Attributes:
        half, layer: which layer of the ``decoder``, or of a stack of the encoder: ``encoder``,
            ``encoder.vit``, ``encoder.qformer``.
        step: the last step that ran: 0 is the prompt, K the K-th decode step.
        counts: tokens of each call of the layer.
        dtype: of the arithmetic that gave ``output``; the weights are in the engine's own.
        kv_dtype: of the runtime; ``auto``: of an Ingot that only knew ``model``.
        expected_from: what ``expected`` was computed by.
        noise, token_noise: relative L2 between the layer in plain PyTorch in ``dtype`` and in the next wider
            dtype: of all tokens, and of the worst token.
        floor, token_floor: relative L2 up to which an output counts as the expected one, all tokens together
            and each by itself (a few tokens of large activations would hide the others).
        output_error, output_worst: relative L2 of ``output`` to ``expected``: all tokens, and the worst.
        engine: name of the engine's folder.
        machine, platform, ingot_version: where ``output`` was computed.
        command: what made the bundle; prompts are left out.
    """

    version: int
    layer: int
    step: int
    counts: tuple[int, ...]
    model: DecoderConfig
    build: BuildConfig
    quant: QuantConfig
    plan: KernelPlan
    dtype: str
    block_size: int
    batch_invariant: bool
    expected_from: str
    noise: float
    token_noise: float
    floor: float
    token_floor: float
    output_error: float
    output_worst: float
    engine: str
    machine: dict[str, Any]
    platform: str
    ingot_version: str
    command: str
    private: str = TEXT.private
    kv_dtype: str = "auto"
    half: str = DECODER

    def __post_init__(self) -> None:
        odd = self.odd_fields()
        odd += [n for n in ("floor", "token_floor") if n not in odd and not 0 <= getattr(self, n) < math.inf]
        if not odd:
            RuntimeConfig.from_json({"block_size": self.block_size, "kv_dtype": self.kv_dtype})
            parse_dtype(self.dtype)
            odd = [name for name in ("layer", "step") if getattr(self, name) < 0]
            if self.half != DECODER and self.shape is None:
                odd.append("half")
            elif min(self.counts, default=0) < 1 or sum(self.counts) > self._longest:
                odd.append("counts")
        if odd:
            seen = {name: getattr(self, name, "another type") for name in odd}
            raise ConfigError("the bundle has invalid fields", seen=seen)

    @property
    def name(self) -> str:
        """``layers.3``, or ``encoder.layers.3``."""
        return layer_name(self.half, self.layer)

    @property
    def of_decoder(self) -> bool:
        return self.half == DECODER

    @property
    def shape(self) -> LayerShape | None:
        """Of an encoder's layer; None: a decoder's, or the model has no such layer."""
        plain = None if self.of_decoder else plain_encoder(self.model)
        return plain.shape_of(self.name) if plain and self.name in stage_names(self.model) else None

    @property
    def width(self) -> int:
        return self.model.hidden_size if self.shape is None else self.shape.stack.hidden_size

    @property
    def reads(self) -> int:
        """Width of the encoded positions that the layer reads; 0: none."""
        if self.shape is not None:
            return self.shape.reads
        return self.model.encoder.hidden_size if self.model.crosses and self.model.encoder is not None else 0

    @property
    def _longest(self) -> int:
        encoder = self.model.encoder
        return self.build.max_seq_len if self.of_decoder or encoder is None else _most_positions(encoder)

    @property
    def as_expected(self) -> bool:
        return self.output_error <= self.floor and self.output_worst <= self.token_floor


@dataclass
class Bundle:
    """A bundle's facts and tensors, these on the CPU; outputs are [T, hidden_size]."""

    facts: BundleFacts
    weights: dict[str, torch.Tensor]
    inputs: LayerInputs
    output: torch.Tensor
    expected: torch.Tensor


def write_bundle(path: Path, bundle: Bundle) -> int:
    """Write a bundle atomically; returns its size in bytes. An existing bundle is replaced.

    Raises:
        BuildError: the path cannot be written, or holds a file that is no bundle.
    """
    if path.exists():
        try:
            with safe_open(path, framework="pt") as file:
                replaces = _KEY in (file.metadata() or {})
        except (SafetensorError, OSError):
            replaces = False
        if not replaces:
            raise BuildError("the file exists and is not a bundle", seen=path, fix="`out` with another file")
    inputs = bundle.inputs
    tensors = {f"{_WEIGHTS}{name}": tensor for name, tensor in bundle.weights.items()}
    tensors |= {"input.hidden": inputs.hidden, "input.positions": inputs.positions}
    tensors |= {} if inputs.encoded is None else {"input.encoded": inputs.encoded}
    tensors |= {"input.rope_rows": inputs.rope_rows, "output": bundle.output, "expected": bundle.expected}
    facts = json.dumps(bundle.facts.to_json(), ensure_ascii=False)
    try:
        with atomic_file(path) as part:
            save_file({k: t.contiguous() for k, t in tensors.items()}, part, {"format": "pt", _KEY: facts})
    except (OSError, SafetensorError) as error:
        raise BuildError("the bundle cannot be written", seen=error, fix="`out`") from None
    return path.stat().st_size


def read_bundle(path: Path) -> Bundle:
    """Read a bundle.

    Raises:
        NoSuchPathError: there is no such file.
        EngineError: it is no bundle, damaged, or of another version.
    """
    if not path.exists():
        raise NoSuchPathError("no such file", seen=path, field="run")
    try:
        with safe_open(path, framework="pt") as file:
            facts = _facts(path, (file.metadata() or {}).get(_KEY))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise EngineError(
            "the bundle cannot be read", seen=f"{path}: {error}", field="run", fix=_ANOTHER
        ) from None
    try:
        return _bundle(facts, tensors)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from None


def _facts(path: Path, text: str | None) -> BundleFacts:
    if text is None:
        raise EngineError("the file is not a bundle", seen=path, field="run", fix=_ANOTHER)
    try:
        data = parse_json(text)
        version = data["version"]
        if version == BUNDLE_VERSION:
            return BundleFacts.from_json(data)
    except (ValueError, TypeError, KeyError, AttributeError, IngotError) as error:
        raise _damaged(path, error) from None
    raise EngineError(
        "the bundle has a different format version",
        seen=version,
        allowed=BUNDLE_VERSION,
        field="run",
        fix="`run` with the version of Ingot that wrote it",
    )


def _damaged(path: Path, error: Exception) -> EngineError:
    return EngineError(
        "the bundle is damaged", seen=f"{path}: {error}", field="run", fix="`run` with an intact file"
    )


def _bundle(facts: BundleFacts, tensors: dict[str, torch.Tensor]) -> Bundle:
    """The tensors by their roles; ValueError where their shapes do not fit together."""
    inputs = LayerInputs(
        tensors["input.hidden"],
        tensors["input.positions"],
        tensors["input.rope_rows"],
        facts.counts,
        tensors.get("input.encoded"),
    )
    weights = {n.removeprefix(_WEIGHTS): t for n, t in tensors.items() if n.startswith(_WEIGHTS)}
    count = sum(facts.counts)
    wide = [inputs.hidden, tensors["output"], tensors["expected"]]
    if any(tuple(t.shape) != (count, facts.width) for t in wide):
        raise ValueError(f"hidden states that are not {count} x {facts.width}")
    encoded = inputs.encoded
    if (facts.reads > 0) != (encoded is not None):
        raise ValueError("encoded positions that the layer does not read, or none that it reads")
    if encoded is not None and facts.model.encoder is not None:
        fits = encoded.dim() == 2 and 1 <= len(encoded) <= _most_positions(facts.model.encoder)
        if not fits or encoded.shape[1] != facts.reads:
            raise ValueError(f"encoded positions of shape {tuple(encoded.shape)}")
    if not torch.equal(inputs.positions, torch.arange(count)) or inputs.rope_rows.shape != (count,):
        raise ValueError("positions that are not those of one request")
    return Bundle(facts, weights, inputs, tensors["output"], tensors["expected"])


def layer_name(half: str, layer: int) -> str:
    """``layers.3`` of the decoder, ``encoder.vit.layers.3`` of a stack."""
    return f"layers.{layer}" if half == DECODER else f"{half}.layers.{layer}"


def _most_positions(encoder: EncoderConfig) -> int:
    """Most hidden states of one input; a bound, where several are joined to one output."""
    joins = modality_named(encoder.modality).joins_positions
    return encoder.max_positions * (encoder.activation_values if joins else 1)
