"""The supported architectures, and their lookup by name."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError, ConfigError, EngineError
from ingot.models.architecture import Architecture
from ingot.models.gemma2 import GEMMA2
from ingot.models.gemma3 import GEMMA3
from ingot.models.gpt2 import GPT2
from ingot.models.hf_values import HfConfig
from ingot.models.llama import LLAMA
from ingot.models.minigpt4 import MINIGPT4
from ingot.models.mistral import MISTRAL
from ingot.models.opt import OPT
from ingot.models.qwen import QWEN
from ingot.models.qwen2 import QWEN2
from ingot.models.qwen3 import QWEN3
from ingot.models.whisper import WHISPER
from ingot.reference.plain_stage import PlainEncoder

ARCHITECTURES: list[Architecture] = [
    *(GEMMA2, GEMMA3, GPT2, LLAMA, MINIGPT4, MISTRAL, OPT, QWEN, QWEN2, QWEN3, WHISPER)
]


def register(architecture: Architecture) -> None:
    """Add an architecture for this process.

    Raises:
        ConfigError: another one has its name, or one of its Hugging Face names.
    """
    for other in ARCHITECTURES:
        names = {architecture.name, *architecture.hf_names} & {other.name, *other.hf_names}
        if names and other != architecture:
            raise ConfigError("two architectures of one name", seen=sorted(names), fix="another name")
    if architecture not in ARCHITECTURES:
        ARCHITECTURES.append(architecture)


def find_architecture(hf_names: object) -> Architecture:
    """The architecture of a checkpoint, by ``architectures`` of its config.json, whatever that holds.

    Raises:
        CheckpointError: none of the names is supported; the error lists those that are.
    """
    for architecture in ARCHITECTURES:
        if isinstance(hf_names, Sequence) and any(name in architecture.hf_names for name in hf_names):
            return architecture
    supported = sorted(name for a in ARCHITECTURES for name in a.hf_names)
    if not hf_names:
        raise CheckpointError(
            "architectures is missing in config.json", allowed=supported, fix="download config.json again"
        )
    raise CheckpointError(
        "unsupported architecture",
        seen=hf_names,
        allowed=supported,
        fix="a checkpoint of one of these; under another name the model would compute something else",
    )


def text_half(hf: HfConfig) -> HfConfig:
    """config.json of the text half of a model with more than text; others as they are.

    Raises:
        CheckpointError: it should have a text half, and has none.
    """
    names = hf.get("architectures")
    for architecture in ARCHITECTURES:
        known = isinstance(names, Sequence) and any(name in architecture.hf_names for name in names)
        if known and architecture.text_config is not None:
            return architecture.text_config(hf)
    return hf


def architecture_named(name: str) -> Architecture:
    """The architecture of an engine, by Ingot's own name.

    Raises:
        EngineError: this version of Ingot does not have it.
    """
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    raise EngineError(
        "the engine's architecture is unknown", seen=name, allowed=[a.name for a in ARCHITECTURES]
    )


def plain_encoder(config: DecoderConfig) -> PlainEncoder | None:
    """A model's reference encoder; None: it has no encoder, or its architecture declares no stages."""
    made = architecture_named(config.architecture).plain_encoder if config.encoder is not None else None
    return None if made is None else made(config)


def can_calibrate(config: DecoderConfig) -> bool:
    """Whether a model can be calibrated: it has only text, or an encoder with stages."""
    return config.encoder is None or plain_encoder(config) is not None
